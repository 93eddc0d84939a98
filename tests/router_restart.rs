// SPDX-License-Identifier: Apache-2.0

//! A restart of the router under clients that keep their connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::harness::api::runtime;
use crate::harness::{ServedFleet, demo_7m, eventually};

/// Clients that keep their connections send one request after the other. A router that is restarted
/// finishes what it has, and takes the next request of a connection before it closes it.
#[test]
fn a_restart_of_the_router_resets_no_connection_that_is_in_use() {
    const CLIENTS: usize = 8;
    const RESTARTS: usize = 6;
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let ends = AtomicBool::new(false);
    let url = format!("{}/v1/completions", fleet.http);
    let (ends, url) = (&ends, &url);
    let (answered, failures) = std::thread::scope(|scope| {
        // The head of a streamed response is sent before the router is told to stop.
        let client = |streams: bool| {
            let body = json!({"prompt": "def f", "max_tokens": 8, "stream": streams});
            let runtime = runtime();
            let client = reqwest::Client::new();
            let (mut answered, mut failures) = (0, Vec::new());
            while !ends.load(Ordering::Relaxed) {
                let answer = runtime.block_on(async {
                    let answer = client.post(url).json(&body).send().await?;
                    let status = answer.status().as_u16();
                    answer.text().await.map(|_| status)
                });
                match answer {
                    Ok(200) => answered += 1,
                    Ok(status) => failures.push(format!("status {status}")),
                    Err(error) => failures.push(format!("{error:?}")),
                }
            }
            (answered, failures)
        };
        let clients: Vec<_> = (0..CLIENTS).map(|index| scope.spawn(move || client(index % 2 == 1))).collect();
        for _ in 0..RESTARTS {
            std::thread::sleep(Duration::from_millis(700));
            let before = fleet.only_process("router").pid;
            assert!(fleet.run_command(&["restart", "router"]).status.success());
            eventually("the next router", || {
                let next = fleet.try_processes()?.into_iter().find(|process| process.role == "router")?;
                (next.pid != before && next.state == "ready").then_some(())
            });
        }
        ends.store(true, Ordering::Relaxed);
        let ended = clients.into_iter().map(|client| client.join().unwrap());
        ended.fold((0, Vec::new()), |(sum, mut all), (answered, failures)| {
            all.extend(failures);
            (sum + answered, all)
        })
    });
    eprintln!("measured: {answered} requests over {RESTARTS} restarts of the router");
    assert!(
        failures.is_empty(),
        "{} of {answered} failed: {:?}",
        failures.len(),
        &failures[..failures.len().min(3)]
    );
    assert!(answered > 100, "{answered}");
    fleet.stop();
}
