// SPDX-License-Identifier: Apache-2.0

//! TLS on the public address. `tests/data/tls/generate` made the certificates.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::v1::inference_client::InferenceClient;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

use crate::harness::api::{TestRequest, generate, runtime};
use crate::harness::{ServedFleet, TIMEOUT, demo_7m, device, eventually, in_tree, proc, serve_config, text};

// As documented in docs/OPERATING.md.
const USAGE: i32 = 2;

fn tls_file(name: &str) -> PathBuf {
    in_tree("tests/data/tls").join(name)
}

/// A configuration with TLS, and more keys of it.
fn config(more: &str) -> String {
    config_with("chain.pem", "key.pem", more)
}

fn config_with(certificate: &str, key: &str, more: &str) -> String {
    let (model, device) = (demo_7m(), device());
    format!(
        "[tls]\ncertificate = {certificate:?}\nkey = {key:?}\n{more}[[models]]\nname = \"m\"\npath = {model:?}\n\
         device = {device:?}\nworkers = 1\nthreads = 1\nkv-tokens = 2048\n"
    )
}

/// Makes a pair of the test data the server's files.
fn install(directory: &Path, name: &str) {
    std::fs::copy(tls_file(&format!("{name}.key")), directory.join("key.pem")).unwrap();
    std::fs::copy(tls_file(&format!("{name}.pem")), directory.join("chain.pem")).unwrap();
}

fn directory_with(name: &str) -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    install(directory.path(), name);
    directory
}

fn curl(arguments: &[&str], url: &str) -> Output {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--fail", "--max-time", "60", "--cacert"]);
    command.arg(tls_file("ca.pem")).args(arguments).arg(url).output().unwrap()
}

async fn connect(url: &str, protocol: &[u8]) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(tls_file("ca.pem")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(url.strip_prefix("https://").unwrap()).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// Whether a new connection gets the certificate of this name.
fn serves(url: &str, name: &str) -> bool {
    let connect = || runtime().block_on(connect(url, b"http/1.1")).ok();
    let stream = eventually("a handshake succeeds", connect);
    let connection = stream.get_ref().1;
    assert_eq!(connection.alpn_protocol(), Some(b"http/1.1".as_slice()));
    let expected = CertificateDer::from_pem_file(tls_file(&format!("{name}.pem"))).unwrap();
    connection.peer_certificates().unwrap()[0] == expected
}

/// A client of gRPC, which counts its connections.
fn grpc_client(url: &str, connections: Arc<AtomicUsize>) -> InferenceClient<Channel> {
    let url = url.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let (url, connections) = (url.clone(), connections.clone());
        async move {
            let stream = connect(&url, b"h2").await?;
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
            connections.fetch_add(1, Ordering::Relaxed);
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
    InferenceClient::new(channel)
}

/// Runs `change` while a client sends one request after the other on one connection.
fn during_streams(url: &str, change: impl FnOnce()) {
    let request = TestRequest {
        prompt: (10..40).collect(),
        max_tokens: 40,
        without_logprobs: true,
        ..Default::default()
    };
    let (done, connections) = (AtomicBool::new(false), Arc::new(AtomicUsize::new(0)));
    std::thread::scope(|scope| {
        let streams = scope.spawn(|| {
            runtime().block_on(async {
                let mut client = grpc_client(url, connections.clone());
                // A busy machine may end the first handshake.
                let first = async {
                    loop {
                        if let Ok(done) = generate(&mut client, &request, |_| {}).await {
                            return done;
                        }
                    }
                };
                let expected = tokio::time::timeout(TIMEOUT, first).await.unwrap();
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(generate(&mut client, &request, |_| {}).await.unwrap(), expected);
                }
                assert_eq!(generate(&mut client, &request, |_| {}).await.unwrap(), expected);
            });
        });
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let connected = || (connections.load(Ordering::Relaxed) > 0).then_some(());
            eventually("the client connects", connected);
            change();
        }));
        done.store(true, Ordering::Relaxed);
        streams.join().unwrap();
        if let Err(panic) = changed {
            std::panic::resume_unwind(panic);
        }
    });
    assert_eq!(connections.load(Ordering::Relaxed), 1, "no connection was lost");
}

/// What a connection receives until it ends.
fn received(mut stream: std::net::TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut received = Vec::new();
    match stream.read_to_end(&mut received) {
        Ok(_) => received,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => received,
        Err(error) => panic!("the connection stays open: {error}"),
    }
}

#[test]
fn https_and_grpc_share_a_port_and_renewed_files_are_used_without_losing_a_connection() {
    let directory = directory_with("server");
    let files = directory.path().to_owned();
    let command = serve_config(&files.join("run"), &config(""));
    let fleet = ServedFleet::start_command(directory, command);
    let url = fleet.http.clone();
    assert!(url.starts_with("https://127.0.0.1:") && fleet.grpc == url, "{url}");
    let address = url.strip_prefix("https://").unwrap();

    // A handshake that does not go on hinders no other, and ends.
    let open = || std::net::TcpStream::connect(address).unwrap();
    let (silent, mut begun) = (open(), open());
    begun.write_all(&[22, 3, 1]).unwrap();
    let mut plain = open();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let alert = received(plain);
    assert!(alert.is_empty() || alert[0] == 21, "not an alert: {alert:?}");

    for version in [["--tls-max", "1.2"].as_slice(), &["--tlsv1.3"]] {
        let health = || curl(version, &format!("{url}/health")).status.success().then_some(());
        eventually("a client of this version is served", health);
    }
    let serves = |name: &str| serves(&url, name);
    assert!(serves("server"));
    during_streams(&url, || {
        install(&files, "renewed");
        eventually("the renewed certificate is used", || serves("renewed").then_some(()));

        std::fs::write(files.join("key.pem"), "no key").unwrap();
        let (_, error) = text(&fleet.run_command(&["reload"]));
        assert!(error.contains("`tls.key`") && error.contains("key.pem"), "{error}");
        // The router looks every second.
        std::thread::sleep(Duration::from_secs(3));
        assert!(serves("renewed"));

        install(&files, "server");
        assert_eq!(fleet.reload(&[]), "the configuration has not changed\n");
        eventually("the first certificate is used again", || serves("server").then_some(()));
    });
    for stalled in [silent, begun] {
        received(stalled);
    }
    let page = || text(&curl(&[], &format!("{url}/metrics"))).0;
    let page = eventually("the metrics are served", || Some(page()).filter(|page| !page.is_empty()));
    // A busy machine may have ended further handshakes.
    for (metric, least) in [
        ("tls_handshake_failures_total{reason=\"failed\"}", 1.0),
        ("tls_handshake_failures_total{reason=\"timeout\"}", 2.0),
        ("tls_certificate_expiry_timestamp_seconds", 4_765_132_800.0),
    ] {
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("ballast:{metric} ")));
        let value: f64 = line.unwrap_or_else(|| panic!("no {metric} in {page}")).parse().unwrap();
        assert!(value >= least, "{metric} {value}");
    }
    fleet.stop();
}

#[test]
fn with_a_client_ca_only_clients_with_its_certificates_connect_also_after_a_restart_of_the_router() {
    let directory = directory_with("server");
    let ca = format!("client-ca = {:?}\n", tls_file("ca.pem"));
    let command = serve_config(&directory.path().join("run"), &config(&ca));
    let fleet = ServedFleet::start_command(directory, command);
    let (pem, key) = (tls_file("client.pem"), tls_file("client.key"));
    let own = ["--cert", pem.to_str().unwrap(), "--key", key.to_str().unwrap()];
    let (pem, key) = (tls_file("server.pem"), tls_file("server.key"));
    let of_a_server = ["--cert", pem.to_str().unwrap(), "--key", key.to_str().unwrap()];
    let health = format!("{}/health", fleet.http);
    let only_own_connects = || {
        for refused in [[].as_slice(), &of_a_server] {
            let output = curl(refused, &health);
            assert!(!output.status.success() && output.stdout.is_empty(), "{refused:?}: {output:?}");
        }
    };
    eventually("the client is served", || curl(&own, &health).status.success().then_some(()));
    only_own_connects();

    let router = fleet.only_process("router");
    proc::send_signal(router.pid, "KILL");
    eventually("the router is restarted", || {
        (fleet
            .try_processes()?
            .iter()
            .any(|found| found.role == "router" && found.pid != router.pid && found.state == "ready"))
        .then_some(())
    });
    eventually("the new router serves", || curl(&own, &health).status.success().then_some(()));
    only_own_connects();
    fleet.stop();
}

#[test]
fn files_that_cannot_be_used_end_the_start_by_name() {
    let directory = directory_with("server");
    let file = |name: &str| directory.path().join(name);
    std::fs::copy(tls_file("renewed.pem"), file("other.pem")).unwrap();
    let cases = [
        ("chain.pem", "missing.pem", "cannot read `tls.key`", "missing.pem"),
        ("other.pem", "key.pem", "is not that of `tls.key`", "other.pem"),
        ("key.pem", "key.pem", "`tls.certificate`", "no certificate"),
    ];
    for (certificate, key, first, second) in cases {
        let output = serve_config(&file("run"), &config_with(certificate, key, "")).output().unwrap();
        let error = text(&output).1;
        assert_eq!(output.status.code(), Some(USAGE), "{error}");
        assert!(error.contains(first) && error.contains(second), "{error}");
        assert!(error.contains(directory.path().to_str().unwrap()), "relative to the configuration: {error}");
    }
    let output = serve_config(&file("run"), &config("ca = \"x\"\n")).output().unwrap();
    assert!(text(&output).1.contains("key `tls.ca`: unknown field"), "{output:?}");
}
