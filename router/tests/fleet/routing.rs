// SPDX-License-Identifier: Apache-2.0

//! Which worker gets a request: cached prompts, sessions, and events that are lost.

use std::collections::BTreeSet;

use reqwest::header::HeaderMap;
use serde_json::{Value, json};

use crate::fake_worker::{FakeBehaviour, KvFrames};
use crate::harness::{RouterHarness, TIMEOUT};

/// The workers that got these requests, one after the other.
async fn workers_of(router: &RouterHarness, requests: &[(Value, HeaderMap)]) -> Vec<usize> {
    let calls = || router.workers.iter().map(|worker| worker.calls().len()).collect::<Vec<_>>();
    let mut chosen = Vec::new();
    for (body, headers) in requests {
        let before = calls();
        let request = router.client.post(format!("{}/v1/completions", router.url));
        let reply = request.headers(headers.clone()).json(body).send().await.unwrap();
        assert_eq!(reply.status(), 200, "{}", reply.text().await.unwrap());
        chosen.extend(before.iter().zip(calls()).position(|(before, after)| *before < after));
    }
    chosen
}

fn distinct(workers: &[usize]) -> usize {
    workers.iter().collect::<BTreeSet<_>>().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn without_events_equal_prompts_share_a_worker_and_salted_ones_do_not() {
    let router = RouterHarness::start(&[5; 8], &[(); 4].map(|()| FakeBehaviour::default())).await;
    let prompt: Vec<u32> = (100..250).collect();
    let body = |salt: String| json!({"prompt": prompt, "max_tokens": 2, "cache_salt": salt});
    let equal: Vec<_> = (0..8).map(|_| (body(String::new()), HeaderMap::new())).collect();
    assert_eq!(distinct(&workers_of(&router, &equal).await), 1);
    let salted: Vec<_> = (0..8).map(|n| (body(format!("tenant-{n}")), HeaderMap::new())).collect();
    assert_eq!(distinct(&workers_of(&router, &salted).await), 4, "nothing leads to another tenant's worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_session_share_a_worker_until_it_is_lost() {
    let mut router = RouterHarness::start(&[5; 8], &[(); 4].map(|()| FakeBehaviour::default())).await;
    let headers =
        |session: &str| HeaderMap::from_iter([("x-session-id".parse().unwrap(), session.parse().unwrap())]);
    let unnamed: Vec<_> =
        (0..8).map(|n| (json!({"prompt": [n], "max_tokens": 2}), HeaderMap::new())).collect();
    assert_eq!(distinct(&workers_of(&router, &unnamed).await), 4, "they take turns");
    let mut homes = BTreeSet::new();
    for session in 0..12 {
        let name = format!("session-{session}");
        let requests = [
            (json!({"prompt": [1], "max_tokens": 2}), headers(&name)),
            (json!({"prompt": [2], "max_tokens": 2, "prompt_cache_key": name}), HeaderMap::new()),
            (json!({"prompt": [3], "max_tokens": 2, "user": name}), HeaderMap::new()),
            (json!({"prompt": [4], "max_tokens": 2, "user": "other"}), headers(&name)),
        ];
        let chosen = workers_of(&router, &requests).await;
        assert_eq!(distinct(&chosen), 1, "{chosen:?}");
        homes.extend(chosen);
    }
    assert!(homes.len() > 1, "sessions have different homes");
    // A hint of another type is none.
    let odd = json!({"prompt": [1], "max_tokens": 2, "user": 7, "prompt_cache_key": ["a"]});
    assert_eq!(workers_of(&router, &[(odd, HeaderMap::new())]).await.len(), 1);
    let home = workers_of(&router, &[(json!({"prompt": [1], "max_tokens": 2}), headers("a"))]).await[0];
    router.workers.remove(home).kill();
    router.wait_for_workers(3).await;
    let moved: Vec<_> = (0..4).map(|n| (json!({"prompt": [n], "max_tokens": 2}), headers("a"))).collect();
    assert_eq!(distinct(&workers_of(&router, &moved).await), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_events_are_asked_for_again_and_after_a_gap_all() {
    const SUBSCRIPTIONS: &[KvFrames] = &[
        // The stream ends: continue.
        KvFrames { frames: &[(9, 1, true), (9, 2, false), (9, 3, false)], ends: true },
        // Event 4 is missing: start again.
        KvFrames { frames: &[(9, 4, false), (9, 6, false)], ends: false },
        // Half a snapshot: start again.
        KvFrames { frames: &[(9, 0, true), (9, 0, false)], ends: true },
        KvFrames { frames: &[(9, 0, true), (9, 8, false)], ends: false },
    ];
    let behaviour = FakeBehaviour { kv_frames: SUBSCRIPTIONS, ..FakeBehaviour::default() };
    let router = RouterHarness::start(&[5; 8], &[behaviour]).await;
    let record = router.workers[0].record.clone();
    let all = async {
        while record.subscriptions.lock().unwrap().len() < 4 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, all).await.unwrap();
    assert_eq!(*record.subscriptions.lock().unwrap(), [(0, 0), (9, 3), (0, 0), (9, 0)]);
    let is_live = async {
        let line = "ballast:prefix_index_live{model_name=\"demo\",engine=\"worker-0\"} 1";
        let metrics = || router.client.get(format!("{}/metrics", router.url)).send();
        while !metrics().await.unwrap().text().await.unwrap().contains(line) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, is_live).await.unwrap();
}
