// SPDX-License-Identifier: Apache-2.0

//! Prefix-aware routing through the real executable: chats of many turns, identical prompts, the
//! loss of a worker and of the router.

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, proc, runs_on_host};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::task::JoinSet;

const WORKERS: usize = 4;
const USERS: usize = 64;
const TURNS: usize = 5;
/// Of each of four workers. One worker gets the same for all.
const KV_TOKENS: usize = 16_384;
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                        {% endfor %}<|im_start|>assistant\n";

fn fleet(workers: usize, mode: &str) -> ServedFleet {
    let directory = tempfile::tempdir().unwrap();
    let template = directory.path().join("chat.jinja");
    std::fs::write(&template, TEMPLATE).unwrap();
    let (workers_text, kv) = (workers.to_string(), (KV_TOKENS * WORKERS / workers).to_string());
    let template = template.to_str().unwrap().to_owned();
    let arguments = ["--workers", &workers_text, "--threads", "1", "--kv-tokens", &kv];
    let more = ["--chat-template", &template, "--routing", mode];
    let fleet = ServedFleet::start_in(directory, &demo_7m(), &[&arguments[..], &more].concat());
    wait_for_events(&HttpClient::connect(&fleet), workers);
    fleet
}

/// The sum of a metric over all workers.
fn sum(http: &HttpClient, name: &str) -> f64 {
    let metrics = http.get("/metrics").1;
    let lines = metrics.lines().filter(|line| line.starts_with(&format!("ballast:{name}{{")));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

fn wait_for_events(http: &HttpClient, workers: usize) {
    eventually("the router follows the caches of all workers", || {
        (sum(http, "prefix_index_live") == workers as f64).then_some(())
    });
}

/// A chat between a user and the model.
struct UserChat {
    user: usize,
    messages: Vec<Value>,
    /// Of the last turn.
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl UserChat {
    fn new(user: usize) -> Self {
        let system = json!({"role": "system", "content": "You write short functions in Python."});
        Self { user, messages: vec![system], prompt_tokens: 0, cached_tokens: 0 }
    }

    /// Sends one more message and appends the answer.
    async fn turn(&mut self, client: &reqwest::Client, url: &str) {
        let (user, turn) = (self.user, self.messages.len());
        let line = |n: usize| format!("    value_{n} = {} * first + {}\n", user * 7919 + turn, n * 31 + user);
        let lines: String = (0..5).map(line).collect();
        let text = format!("def function_{user}_{turn}(first):\n{lines}    return ");
        self.messages.push(json!({"role": "user", "content": text}));
        let body = json!({"messages": self.messages, "max_tokens": 12, "temperature": 0.0});
        let request = client.post(format!("{url}/v1/chat/completions")).json(&body);
        let reply = request.send().await.unwrap();
        assert_eq!(reply.status().as_u16(), 200);
        let reply: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
        let usage = &reply["usage"];
        self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap();
        self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let content = reply["choices"][0]["message"]["content"].clone();
        self.messages.push(json!({"role": "assistant", "content": content}));
    }
}

fn chats(users: usize) -> Vec<UserChat> {
    (0..users).map(UserChat::new).collect()
}

/// All users take so many turns at the same time.
fn take_turns(http: &HttpClient, chats: Vec<UserChat>, turns: usize) -> Vec<UserChat> {
    let (client, url) = (&http.client, &http.url);
    http.runtime.block_on(async {
        let mut running = JoinSet::new();
        for mut chat in chats {
            let (client, url) = (client.clone(), url.clone());
            running.spawn(async move {
                for _ in 0..turns {
                    chat.turn(&client, &url).await;
                }
                chat
            });
        }
        let mut chats = running.join_all().await;
        chats.sort_by_key(|chat| chat.user);
        chats
    })
}

/// Prompt tokens that the workers found in their caches and that they looked up, once they have
/// reported all. They report every 250 ms.
fn hits_of(http: &HttpClient) -> (f64, f64) {
    let mut before = -1.0;
    eventually("the workers report no more prompts", || {
        std::thread::sleep(Duration::from_millis(600));
        let queries = sum(http, "prefix_cache_queries_total");
        (std::mem::replace(&mut before, queries) == queries).then_some(())
    });
    (sum(http, "prefix_cache_hits_total"), before)
}

/// Hit rate and transcripts of 64 users.
fn chat_over(workers: usize, mode: &str) -> (f64, Vec<Vec<Value>>) {
    let fleet = fleet(workers, mode);
    let http = HttpClient::connect(&fleet);
    let chats = take_turns(&http, chats(USERS), TURNS);
    let (hits, queries) = hits_of(&http);
    eprintln!("{workers} workers, {mode}: {hits} of {queries} prompt tokens cached");
    fleet.stop();
    (hits / queries, chats.into_iter().map(|chat| chat.messages).collect())
}

#[test]
fn i5_chats_of_64_users_over_four_workers_hit_the_cache_as_over_one_and_get_the_same_answers() {
    if !runs_on_host(
        "i5_chats_of_64_users_over_four_workers_hit_the_cache_as_over_one_and_get_the_same_answers",
    ) {
        return;
    }
    let (one, expected) = chat_over(1, "auto");
    let (four, found) = chat_over(WORKERS, "auto");
    assert!(four >= 0.95 * one, "{four} of prompt tokens cached, {one} with one worker");
    assert!(found == expected, "the worker changes no answer");
}

/// How many tokens the workers computed of `count` equal prompts of about 900 tokens.
fn computed_of_equal_prompts(http: &HttpClient, mark: &str, count: usize, at_once: bool) -> (f64, f64) {
    let computed = || {
        let (hits, queries) = hits_of(http);
        queries - hits
    };
    let before = computed();
    let lines: Vec<String> = (0..60).map(|n| format!("{mark}_{n} = {}", n * 7919)).collect();
    let body = json!({"prompt": lines.join("\n"), "max_tokens": 2, "temperature": 0.0});
    let mut tokens = Vec::new();
    http.runtime.block_on(async {
        let mut running = JoinSet::new();
        for _ in 0..count {
            let request = http.client.post(format!("{}/v1/completions", http.url)).json(&body);
            running.spawn(async move {
                let reply = request.send().await.unwrap().text().await.unwrap();
                let reply: Value = serde_json::from_str(&reply).unwrap();
                reply["usage"]["prompt_tokens"].as_u64().unwrap()
            });
            if !at_once {
                tokens.extend(running.join_next().await.unwrap());
            }
        }
        tokens.extend(running.join_all().await);
    });
    (computed() - before, tokens[0] as f64)
}

#[test]
fn identical_prompts_go_to_one_worker_and_are_computed_once() {
    if !runs_on_host("identical_prompts_go_to_one_worker_and_are_computed_once") {
        return;
    }
    let fleet = fleet(WORKERS, "auto");
    let http = HttpClient::connect(&fleet);
    for (mark, count, at_once) in [("alone", 8, false), ("together", 4, true)] {
        let (computed, tokens) = computed_of_equal_prompts(&http, mark, count, at_once);
        // Each prompt computes its last block again.
        let allowed = tokens + (count * 16) as f64;
        assert!(tokens > 600.0 && computed <= allowed, "{mark}: {computed} computed of {count} x {tokens}");
    }
    let by_prefix =
        http.metric("ballast:routing_decisions_total{model_name=\"pycoder-7m-q8_0\",reason=\"prefix\"}");
    assert!(by_prefix.unwrap() >= 10.0, "{by_prefix:?}");
    assert!(sum(&http, "routing_cached_tokens_total") > 5000.0);
    assert!((1.0..1e6).contains(&sum(&http, "prefix_index_bytes")));
    fleet.stop();
}

/// Lets eight users take a turn, and returns how many found most of the prompt in a cache.
fn users_with_hits(http: &HttpClient, chats: &mut [UserChat]) -> usize {
    for chat in chats.iter_mut() {
        http.runtime.block_on(chat.turn(&http.client, &http.url));
    }
    chats.iter().filter(|chat| chat.cached_tokens * 2 > chat.prompt_tokens).count()
}

#[test]
fn a_killed_worker_takes_only_its_own_prefixes_and_a_new_router_learns_all_again() {
    if !runs_on_host("a_killed_worker_takes_only_its_own_prefixes_and_a_new_router_learns_all_again") {
        return;
    }
    let fleet = fleet(WORKERS, "auto");
    let http = HttpClient::connect(&fleet);
    let mut chats = take_turns(&http, chats(8), 2);
    assert_eq!(users_with_hits(&http, &mut chats), 8);

    proc::send_signal(fleet.only_process("router").pid, "KILL");
    eventually("the router is back", || (http.try_get("/ready") == Some(200)).then_some(()));
    wait_for_events(&http, WORKERS);
    assert_eq!(users_with_hits(&http, &mut chats), 8, "the new router has heard of all prefixes");

    // Those who chat during the loss are answered too.
    let victim = fleet.processes_by_role("worker")[0].pid;
    let mut chats = std::thread::scope(|scope| {
        let turns = scope.spawn(|| take_turns(&HttpClient::connect(&fleet), chats, 3));
        proc::send_signal(victim, "KILL");
        turns.join().unwrap()
    });
    wait_for_events(&http, WORKERS);
    assert_eq!(users_with_hits(&http, &mut chats), 8, "the prefixes were computed again");
    fleet.stop();
}
