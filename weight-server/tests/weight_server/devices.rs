// SPDX-License-Identifier: Apache-2.0

//! GPU cases that need no GPU: refused loads, and adoption of a generation on an absent GPU.

use handoff::attach::{AttachRequest, request_model};
use memory::manifest::{Allocation, DeviceKind, Manifest, ManifestDevice};
use memory::memfd::SealedMemfd;
use proto::weights::v1 as wire;

use crate::support::{ServerOptions, TestServer, load_failure, request};

/// A UUID that no machine has.
const ABSENT: &str = "GPU-00000000-0000-4000-8000-00000000dead";

fn with_device() -> TestServer {
    let config = format!("[[devices]]\nid = {ABSENT:?}\nbudget = \"16GiB\"");
    TestServer::start(ServerOptions { config, ..ServerOptions::default() })
}

fn assert_nothing_reserved(server: &TestServer) {
    let status = server.status();
    assert!(status.generations.is_empty(), "{status:#?}");
    let ledger = status.ledger.unwrap();
    assert!(ledger.reservations.is_empty(), "{ledger:#?}");
    assert_eq!(ledger.devices.len(), 2);
}

#[test]
fn load_onto_an_absent_device_fails_with_one_error_and_reserves_nothing() {
    let server = with_device();
    let path = server.make_model("m", &[1000, 2000]);
    let fds = server.server_fds();
    let error = server.load_onto(ABSENT, "m", &path).unwrap_err();
    assert_eq!(load_failure(&error), wire::LoadFailure::Unsupported);
    // The reason depends on the build and on the machine.
    let reasons = ["built without CUDA", "no NVIDIA driver here", "sees no GPU", "there is no GPU GPU-0000"];
    assert!(reasons.iter().any(|reason| error.message().contains(reason)), "{error}");
    assert_nothing_reserved(&server);
    // This test's admin connection takes a moment to close.
    server.wait_status("the end of its descriptors", |_| server.server_fds() <= fds + 1);
    assert!(!server.server_has_driver());
}

#[test]
fn load_onto_an_unconfigured_device_names_the_configured_ones() {
    let server = with_device();
    let path = server.make_model("m", &[1000]);
    for device in ["GPU-ffffffff-0000-4000-8000-000000000000", "cuda:0"] {
        let error = server.load_onto(device, "m", &path).unwrap_err();
        assert!(error.message().contains(device) && error.message().contains(ABSENT), "{error}");
    }
    assert_nothing_reserved(&server);
}

#[test]
fn device_name_that_is_not_a_uuid_is_refused() {
    let config = "[[devices]]\nid = \"cuda:0\"\nbudget = \"16GiB\"".to_owned();
    let server = TestServer::start(ServerOptions { config, ..ServerOptions::default() });
    let path = server.make_model("m", &[1000]);
    let error = server.load_onto("cuda:0", "m", &path).unwrap_err();
    assert!(error.message().contains("nvidia-smi -L"), "{error}");
    assert_nothing_reserved(&server);
}

/// A GPU that shares the host's memory, and a budget for both.
fn with_unified_device(budget: &str) -> TestServer {
    let config = format!("host-budget = {budget:?}\n[[devices]]\nid = {ABSENT:?}\nbudget = \"host\"");
    TestServer::start(ServerOptions { config, ..ServerOptions::default() })
}

#[test]
fn gpu_with_unified_memory_and_host_have_one_row() {
    let mut server = with_unified_device("2MiB");
    server.kill_server();
    put_generation(&server);
    server.restart_server();
    // A verifier may be running, whose context is reserved too.
    let reserved = |status: &wire::Status| status.ledger.as_ref().unwrap().reserved_bytes;
    let status = server.wait_status("the adopted generation", |status| reserved(status) == 4096 + 8192);
    let ledger = status.ledger.unwrap();
    let [row] = &ledger.devices[..] else { panic!("{ledger:#?}") };
    assert_eq!((row.device.as_str(), row.capacity_bytes), ("host", 2 << 20));
    assert_eq!((row.reserved_bytes, &row.unified_devices[..]), (4096 + 8192, &[ABSENT.to_owned()][..]));
    assert_eq!((ledger.capacity_bytes, ledger.reserved_bytes), (2 << 20, 4096 + 8192), "nothing twice");
    // What the GPU has is not there for the host.
    let path = server.make_model("h", &[2 << 20]);
    let error = server.load("h", &path).unwrap_err();
    assert_eq!(load_failure(&error), wire::LoadFailure::OutOfMemory, "{error}");
    assert!(error.message().contains("are needed on host"), "{error}");
}

#[test]
fn memory_of_a_gpu_that_is_a_node_of_the_host_is_not_promised_to_the_host() {
    if memory::numa::nodes() != [0] {
        println!("SKIPPED: this test takes the only node of a machine for a GPU's");
        return;
    }
    let config = format!("[[devices]]\nid = {ABSENT:?}\nbudget = \"16GiB\"\nnuma-node = 0");
    let server = TestServer::start(ServerOptions { config, ..ServerOptions::default() });
    let ledger = server.status().ledger.unwrap();
    let host = ledger.devices.iter().find(|row| row.device == "host").unwrap();
    let (available, of_node) = (
        service::meminfo::host_memory().unwrap().available_bytes,
        memory::numa::available_on([0].into_iter()),
    );
    // Other processes take and free memory meanwhile.
    let rest = available.saturating_sub(of_node) + of_node / 4;
    assert!(host.capacity_bytes <= rest, "{host:?}: {of_node} of {available} are the node's");
    let error = server.load_onto("host:0", "m", &server.make_model("m", &[1000])).unwrap_err();
    assert!(error.message().contains("there is no device host:0"), "{error}");
}

/// Puts the descriptors of a model on a GPU into the FD store. Only a driver could check them.
fn put_generation(server: &TestServer) {
    let allocations = [4096, 8192].map(|bytes| SealedMemfd::from_bytes("stand-in", &vec![7; bytes]).unwrap());
    let manifest = Manifest {
        model: "m".to_owned(),
        digest: [3; 32],
        generation: 5,
        files: Vec::new(),
        devices: vec![ManifestDevice {
            kind: DeviceKind::Cuda,
            id: ABSENT.to_owned(),
            compute_capability: 90,
        }],
        layout: 1,
        one_per_tensor: false,
        allocations: [4096, 8192].map(|bytes| Allocation { device: 0, bytes, inode: 0 }).into(),
        tensors: Vec::new(),
        gguf_metadata: Default::default(),
        created_unix_seconds: 0,
    };
    server.fd_store.put("g5.manifest", handoff::manifest::seal_manifest(&manifest).unwrap().into());
    for (index, allocation) in allocations.into_iter().enumerate() {
        server.fd_store.put(&format!("g5.a{index}"), allocation.into());
    }
}

#[test]
fn adopted_generation_on_an_absent_gpu_serves_unverified() {
    let mut server = with_device();
    server.kill_server();
    put_generation(&server);
    server.restart_server();
    let status = server.wait_status("the adopted generation", |status| !status.generations.is_empty());
    let generation = &status.generations[0];
    assert_eq!(generation.integrity(), wire::GenerationIntegrity::Unverified);
    assert_eq!(generation.state(), wire::GenerationState::Ready);
    assert_eq!((generation.device.as_str(), generation.layout, generation.adopted), (ABSENT, 1, true));
    let device = |status: &wire::Status| {
        let devices = &status.ledger.as_ref().unwrap().devices;
        devices.iter().find(|device| device.device == ABSENT).unwrap().reserved_bytes
    };
    // A verifier may be running, whose context is reserved too.
    server.wait_status("the end of its first check", |status| device(status) == 4096 + 8192);

    let asked = AttachRequest { device: ABSENT.to_owned(), layout: 1, ..request("m") };
    let granted = request_model(&server.socket(), &asked, |_| {}).unwrap();
    let reserved = device(&server.status());
    assert_eq!(reserved, 4096 + 8192 + asked.kv_bytes + asked.workspace_bytes);
    // Descriptors of another device cannot be mapped on the host.
    granted.import_host().unwrap_err();

    server.verify("m").unwrap_err();
    let status = server.status();
    assert_eq!(status.generations[0].integrity(), wire::GenerationIntegrity::Unverified);
    assert!(!server.server_has_driver());
    assert_eq!(server.verify("other").unwrap_err().code(), tonic::Code::NotFound);
}
