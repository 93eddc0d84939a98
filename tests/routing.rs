// SPDX-License-Identifier: Apache-2.0

//! Routing of streams to the workers of one device: packed, and spread.

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, demo_22m, device, eventually, proc, runs_on_host};
use serde_json::json;

const WORKERS: usize = 4;

/// Long enough to look at streams while they run.
const LONG: u32 = 400;

fn requests(count: u64) -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: LONG,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..count).map(request).collect()
}

fn fleet(arguments: &[&str]) -> ServedFleet {
    ServedFleet::start(&demo_7m(), &[&["--workers", "4", "--threads", "1"], arguments].concat())
}

/// The number of streams that the router has placed on each worker.
pub(crate) fn placed_streams(fleet: &ServedFleet) -> Vec<usize> {
    let client = HttpClient::connect(fleet);
    let streams = |index: usize| {
        let line = format!("engine=\"worker-{index}\"");
        let metrics = client.get("/metrics").1;
        let of_worker = |text: &&str| text.starts_with("ballast:num_streams_placed") && text.contains(&line);
        let value = metrics.lines().find(of_worker).and_then(|text| text.rsplit(' ').next());
        // A lost worker has no line until it is back.
        value.map_or(0, |value| value.parse().unwrap())
    };
    (0..WORKERS).map(streams).collect()
}

fn generate_and_look(
    fleet: &ServedFleet,
    requests: &[TestRequest],
    look: impl FnOnce() + Send,
) -> Vec<Continuation> {
    let done = runtime().block_on(fleet.generate_during_fault(requests, look));
    done.into_iter().map(Result::unwrap).collect()
}

/// The streams of each worker, the most first, once all streams are placed.
fn streams_by_number(fleet: &ServedFleet, count: usize) -> Vec<usize> {
    eventually("all streams are placed", || {
        let mut streams = placed_streams(fleet);
        streams.sort_unstable_by_key(|&number| std::cmp::Reverse(number));
        (streams.iter().sum::<usize>() == count).then_some(streams)
    })
}

#[test]
fn packed_streams_fill_one_worker_up_to_its_bound_before_the_next() {
    // A worker with steps of 4 tokens runs 4 sequences.
    let fleet = fleet(&["--routing", "packed", "--step-tokens", "4"]);
    let requests = requests(6);
    let mut found = Vec::new();
    generate_and_look(&fleet, &requests[..4], || found.push(streams_by_number(&fleet, 4)));
    generate_and_look(&fleet, &requests, || found.push(streams_by_number(&fleet, 6)));
    assert_eq!(found, [[4, 0, 0, 0], [4, 2, 0, 0]]);
    fleet.stop();
}

#[test]
fn workers_of_the_host_share_streams_unless_they_are_packed() {
    if !runs_on_host("workers_of_the_host_share_streams_unless_they_are_packed") {
        return;
    }
    for arguments in [&[][..], &["--routing", "least-loaded"]] {
        let fleet = fleet(arguments);
        let mut found = Vec::new();
        generate_and_look(&fleet, &requests(6), || found = streams_by_number(&fleet, 6));
        assert_eq!(found, [2, 2, 1, 1], "{arguments:?}");
        fleet.stop();
    }
}

#[test]
fn i6_all_streams_of_a_lost_packed_worker_continue_on_one_other() {
    let fleet = fleet(&["--routing", "packed"]);
    let requests = requests(6);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let mut after = Vec::new();
    let found = generate_and_look(&fleet, &requests, || {
        assert_eq!(streams_by_number(&fleet, 6), [6, 0, 0, 0]);
        let packed = placed_streams(&fleet).iter().position(|&streams| streams == 6).unwrap();
        let workers = fleet.processes_by_role("worker");
        let victim = workers.iter().find(|worker| worker.name == format!("worker-{packed}")).unwrap();
        proc::send_signal(victim.pid, "KILL");
        after = eventually("the streams continue elsewhere", || {
            let now = placed_streams(&fleet);
            (now.iter().sum::<usize>() == 6 && now[packed] == 0).then_some(now)
        });
    });
    for (expected, found) in expected.iter().zip(&found) {
        let expected = expected.as_ref().unwrap();
        assert_eq!((&expected.tokens, &expected.logprob_bits), (&found.tokens, &found.logprob_bits));
        assert_eq!(found.resumes, 1);
    }
    assert_eq!(after.iter().filter(|&&streams| streams > 0).count(), 1, "{after:?}");
    fleet.stop();
}

#[test]
fn a_restarted_router_calls_a_model_whose_workers_are_not_heard_yet_unavailable_and_not_unknown() {
    let model = |name: &str, path: &std::path::Path| {
        format!(
            "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {:?}\nworkers = 1\nthreads = 1\n\
             kv-tokens = 1024\n",
            device()
        )
    };
    let router = "[router]\nworker-wait = \"3s\"\n".to_owned();
    let fleet = ServedFleet::start_config(
        &[router, model("first", &demo_7m()), model("second", &demo_22m())].concat(),
    );
    let http = HttpClient::connect(&fleet);
    let status = |model: &str| {
        let mut body = json!({"model": model, "prompt": "import ", "max_tokens": 2});
        if model.is_empty() {
            body["model"].take();
        }
        let request = http.client.post(format!("{}/v1/completions", http.url)).json(&body).send();
        http.runtime.block_on(request).ok().map(|reply| reply.status().as_u16())
    };
    assert_eq!((status("first"), status("second"), status("third")), (Some(200), Some(200), Some(404)));
    // A stopped worker tells the next router nothing. The supervisor's watchdog allows 30 s.
    let stopped = fleet.processes_by_role("worker").into_iter().find(|worker| worker.name == "worker-1");
    let stopped = stopped.unwrap().pid;
    proc::send_signal(stopped, "STOP");
    proc::send_signal(fleet.only_process("router").pid, "KILL");
    eventually("the new router serves the first model", || (status("first") == Some(200)).then_some(()));
    let (second, unnamed) = (status("second"), status(""));
    proc::send_signal(stopped, "CONT");
    assert_eq!(second, Some(503));
    assert_eq!(unnamed, Some(503), "the only model that is known is not the only one");
    eventually("it serves the second model", || (status("second") == Some(200)).then_some(()));
    assert_eq!(status(""), Some(400), "two models are served");
    assert_eq!(status("third"), Some(404));
    fleet.stop();
}
