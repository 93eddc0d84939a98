// SPDX-License-Identifier: Apache-2.0

//! Clients that hold the router's memory and connections. Each test has a bound on what they get.

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, proc};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Of the maximum length of 8 MiB.
const SENT_BYTES: usize = 7_900_000;

fn fleet() -> (ServedFleet, u32) {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let router = fleet.only_process("router").pid;
    (fleet, router)
}

fn address(fleet: &ServedFleet) -> String {
    fleet.http.strip_prefix("http://").unwrap().to_owned()
}

/// A connection of its own asks for /health. Panics if the answer takes longer than any probe
/// waits.
fn check_health(address: &str) {
    const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PROBE_TIMEOUT)).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap_or_else(|error| panic!("/health: {error}"));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn check_completion(fleet: &ServedFleet) {
    let body = json!({"prompt": "import ", "max_tokens": 4});
    HttpClient::connect(fleet).post_json("/v1/completions", &body);
}

/// Sends most of a request and stops. The router may refuse it at any byte.
fn stall(address: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 8000000\r\n\r\n";
    let _refused = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    stream
}

#[test]
fn bodies_that_stall_hold_a_bounded_amount_of_memory() {
    let (fleet, router) = fleet();
    check_completion(&fleet);
    let before = proc::resident_bytes(router);
    let body = vec![b'x'; SENT_BYTES];
    let stalled: Vec<TcpStream> = (0..150).map(|_| stall(&address(&fleet), &body)).collect();
    let grown = proc::resident_bytes(router).saturating_sub(before);
    eprintln!("measured: 150 stalled bodies take {} MiB", grown / MIB);
    // The budget of one client, and as much again for buffers that are being filled.
    assert!(grown < 300 * MIB, "the router grew by {} MiB", grown / MIB);
    check_health(&address(&fleet));
    // A tenant of its own has a budget of its own.
    let http = HttpClient::connect(&fleet);
    let status = http.runtime.block_on(async {
        let request = http.client.post(format!("{}/v1/completions", http.url));
        let request =
            request.header("x-ballast-tenant", "other").json(&json!({"prompt": "x", "max_tokens": 2}));
        request.send().await.unwrap().status()
    });
    assert_eq!(status, 200);
    drop(stalled);
    eventually("the bytes are released", || (http.metric("ballast:request_bytes")? == 0.0).then_some(()));
    check_completion(&fleet);
    fleet.stop();
}

#[test]
fn a_body_that_stops_is_refused_in_time() {
    let (fleet, _) = fleet();
    let mut stream = stall(&address(&fleet), &[b'x'; 1000]);
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let begin = Instant::now();
    let mut answer = [0; 256];
    let length = stream.read(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // The grace time is 10 s.
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}", begin.elapsed());
    fleet.stop();
}

#[test]
fn the_streams_of_one_http2_connection_hold_a_bounded_amount_of_memory() {
    const STREAMS: usize = 60;
    let (fleet, router) = fleet();
    check_completion(&fleet);
    let before = proc::resident_bytes(router);
    let http = HttpClient::connect(&fleet);
    http.runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(address(&fleet)).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let url = format!("{}/v1/completions", fleet.http);
        let mut tasks = Vec::new();
        let mut client = client.ready().await.unwrap();
        for _ in 0..STREAMS {
            let request = http::Request::post(&url).header("content-type", "application/json");
            let request = request.header("content-length", 8_000_000).body(()).unwrap();
            client = client.ready().await.unwrap();
            let (response, body) = client.send_request(request, false).unwrap();
            tasks.push(tokio::spawn(send_slowly(response, body)));
        }
        let mut statuses = Vec::new();
        for task in tasks {
            statuses.extend(task.await.unwrap());
        }
        let grown = proc::resident_bytes(router).saturating_sub(before);
        eprintln!("measured: {STREAMS} HTTP/2 streams take {} MiB, refused: {statuses:?}", grown / MIB);
        // The budget of one connection, and as much again for buffers that are being filled.
        assert!(grown < 100 * MIB, "the router grew by {} MiB", grown / MIB);
        assert!(!statuses.is_empty() && statuses.iter().all(|&status| status == 429), "{statuses:?}");
        check_health(&address(&fleet));
    });
    check_completion(&fleet);
    fleet.stop();
}

/// Sends most of a body. Returns the status of a refusal, or `None` if the body stalls.
async fn send_slowly(
    mut response: h2::client::ResponseFuture,
    mut body: h2::SendStream<bytes::Bytes>,
) -> Option<u16> {
    let send = async {
        let chunk = bytes::Bytes::from(vec![b'x'; 16 << 10]);
        let mut sent = 0;
        while sent < SENT_BYTES {
            body.reserve_capacity(chunk.len());
            let granted = std::future::poll_fn(|context| body.poll_capacity(context)).await;
            let Some(Ok(granted)) = granted else { break };
            let part = chunk.slice(..granted.min(chunk.len()));
            sent += part.len();
            if body.send_data(part, false).is_err() {
                break;
            }
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
    };
    tokio::select! {
        answer = &mut response => answer.ok().map(|answer| answer.status().as_u16()),
        () = send => None,
        () = tokio::time::sleep(Duration::from_secs(30)) => None,
    }
}

#[test]
fn silent_connections_do_not_delay_a_health_check() {
    let (fleet, _) = fleet();
    let address = address(&fleet);
    let silent: Vec<TcpStream> = (0..2048).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let begin = Instant::now();
    check_health(&address);
    eprintln!("measured: /health beside {} silent connections takes {:?}", silent.len(), begin.elapsed());
    check_completion(&fleet);
    drop(silent);
    fleet.stop();
}

#[test]
fn half_open_http2_connections_take_no_processor_time() {
    const WATCHED: Duration = Duration::from_secs(5);
    let (fleet, router) = fleet();
    let address = address(&fleet);
    let watch = || {
        let before = proc::cpu_time(router).unwrap();
        std::thread::sleep(WATCHED);
        proc::cpu_time(router).unwrap() - before
    };
    let idle = watch();
    let half_open: Vec<TcpStream> = (0..1000)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(b"PRI * HTTP/2.0\r\n").unwrap();
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_secs(1));
    let used = watch();
    eprintln!("measured: {} half prefaces take {used:?} of {WATCHED:?}, idle {idle:?}", half_open.len());
    // A look at each of them every 5 ms takes more, on the busiest machine too.
    assert!(used < idle + WATCHED / 50, "the router used {used:?} of {WATCHED:?}, without them {idle:?}");
    check_health(&address);
    fleet.stop();
}

#[test]
fn the_health_address_answers_while_every_connection_is_busy() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ballast.toml");
    let text = format!(
        "listen = \"127.0.0.1:0\"\n[router]\nconnections-max = 2\nhealth-listen = \"127.0.0.1:{port}\"\n\
         [[models]]\nname = \"demo\"\npath = {:?}\nworkers = 1\nthreads = 1\ndevice = {:?}\n",
        demo_7m(),
        crate::harness::device()
    );
    std::fs::write(&config, text).unwrap();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = crate::harness::ballast();
    command.args(["serve", "--json", "--config"]).arg(&config);
    command.arg("--runtime-dir").arg(directory.path()).stdout(std::process::Stdio::piped());
    let fleet = ServedFleet::start_command(directory, command);
    let begin = |address: &str| stall(address, b"x");
    let busy = [begin(&address(&fleet)), begin(&address(&fleet))];
    for _ in 0..10 {
        check_health(&format!("127.0.0.1:{port}"));
    }
    drop(busy);
    check_completion(&fleet);
    fleet.stop();
}

/// Sends `begin`, and then `more` every 100 ms. Returns what the router answers until it closes the
/// connection, and the time until then.
fn trickle(address: &str, begin: &[u8], more: &[u8]) -> (String, Duration) {
    const PAUSE: Duration = Duration::from_millis(100);
    let started = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PAUSE)).unwrap();
    stream.write_all(begin).unwrap();
    let (mut answer, mut part) = (Vec::new(), [0; 1024]);
    while started.elapsed() < crate::harness::TIMEOUT {
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(length) => answer.extend(&part[..length]),
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break,
            // The next read sees a connection that is closed.
            Err(_) => drop(stream.write_all(more)),
        }
    }
    (String::from_utf8_lossy(&answer).into_owned(), started.elapsed())
}

#[test]
fn clients_that_trickle_are_cut_off_in_time_while_others_are_served() {
    let limits =
        "[router]\nhead-timeout = \"2s\"\nbody-grace = \"2s\"\nbody-rate-min = \"1KiB\"\n".to_owned();
    let fleet = ServedFleet::start_config(&(limits + &crate::harness::model_table("demo", &demo_7m(), "")));
    let address = &address(&fleet);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n";
    let body = format!("{head}content-type: application/json\r\ncontent-length: 8000\r\n\r\n");
    // Any further byte would make half a preface another protocol.
    let slow = [(format!("{head}x-slow: "), "x"), (body, "x"), ("PRI * HTTP/2.0\r\n".to_owned(), "")];
    let ends = std::thread::scope(|scope| {
        let threads: Vec<_> = slow
            .iter()
            .map(|(begin, more)| scope.spawn(|| trickle(address, begin.as_bytes(), more.as_bytes())))
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            check_health(address);
            check_completion(&fleet);
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for ((begin, _), (answer, time)) in slow.iter().zip(&ends) {
        eprintln!("measured: cut off after {time:?}: {answer:?}");
        let seconds = time.as_secs_f64();
        assert!((1.9..20.0).contains(&seconds), "{begin:?} held a connection for {time:?}");
        assert!(!answer.starts_with("HTTP/1.1 2"), "{begin:?}: {answer}");
    }
    assert!(ends[1].0.starts_with("HTTP/1.1 408"), "{}", ends[1].0);
    fleet.stop();
}
