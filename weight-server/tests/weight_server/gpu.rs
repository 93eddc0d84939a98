// SPDX-License-Identifier: Apache-2.0

//! A model on a real GPU, from its file to its quarantine. Without a GPU the test prints SKIPPED
//! and passes.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use cuda::{AddressRange, Device, DeviceSelector, PhysicalMemory};
use handoff::attach::{AttachRequest, request_model};
use handoff::lease::LeaseStatus;
use memory::device::DeviceTensor;
use memory::memfd::SealedMemfd;
use proto::weights::v1 as wire;
use quant::DType;
use quant::layout::Tiles;

use crate::support::{DIRECTORY, MODEL, ServerOptions, TEST_TIMEOUT, TestServer, TestWorkerProcess, request};

const DEVICE: &str = "BALLAST_TEST_DEVICE";

/// Dtype, columns, rows: every way in which a tensor is transferred. The first and the third are
/// transferred in several parts; those of the third do not end at whole checksum chunks. The last
/// chunk of the fourth is hashed on the host.
const TENSORS: [(DType, u64, u64); 8] = [
    (DType::Q4_K, 4096, 9000),
    (DType::F32, 777, 1),
    (DType::Q6_K, 5120, 3001),
    (DType::Q8_0, 32, 30841),
    (DType::F16, 4096, 2051),
    (DType::Q5_0, 96, 17),
    (DType::Q3_K, 2560, 1000),
    (DType::BF16, 8, 3),
];

fn first_device() -> Option<Device> {
    let opened = cuda::open_driver().map_err(|error| error.to_string()).and_then(|driver| {
        Device::open(driver, DeviceSelector::Ordinal(0)).map_err(|error| error.to_string())
    });
    opened.inspect_err(|error| println!("SKIPPED: models on a GPU: {error}")).ok()
}

fn bytes_of(index: usize, bytes: u64) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(index as u64 + 1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(bytes as usize).collect()
}

fn make_model(path: &Path) {
    let mut metadata = gguf::MetadataBuilder::default();
    metadata.put("general.name", "test").unwrap();
    metadata.put("tokenizer.ggml.model", "none").unwrap();
    let mut layout = gguf::TensorLayout::default();
    for (index, (dtype, cols, rows)) in TENSORS.into_iter().enumerate() {
        layout.add(&format!("tensor.{index}"), dtype, &[cols, rows]).unwrap();
    }
    let file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    let mut writer = gguf::GgufWriter::start(file, &metadata, layout).unwrap();
    for (index, (dtype, cols, rows)) in TENSORS.into_iter().enumerate() {
        writer.write(&bytes_of(index, dtype.row_bytes(cols).unwrap() * rows)).unwrap();
    }
    writer.finish().unwrap();
}

/// The checksum that a worker should report.
fn expected() -> String {
    let mut hasher = blake3::Hasher::new();
    for (index, (dtype, cols, rows)) in TENSORS.into_iter().enumerate() {
        hasher.update(format!("tensor.{index}").as_bytes());
        hasher.update(&bytes_of(index, dtype.row_bytes(cols).unwrap() * rows));
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Over names and bytes of all tensors, in the file's layout.
fn checksum(device: &Device, tensors: &[DeviceTensor]) -> String {
    let context = device.context().unwrap();
    let mut hasher = blake3::Hasher::new();
    for tensor in tensors {
        let dtype = DType::from_id(tensor.dtype).unwrap();
        let shape = Tiles::new(dtype, tensor.shape[0] as usize, tensor.shape[1] as usize).unwrap();
        let mut tiles = vec![0; tensor.bytes as usize];
        tensor.read(&context, 0, &mut tiles).unwrap();
        let mut raw = vec![0; shape.raw_bytes()];
        shape.restore(&tiles, &mut raw).unwrap();
        hasher.update(tensor.name.as_bytes()).update(&raw);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

fn attach_request(model: &str, device: &Device) -> AttachRequest {
    AttachRequest { device: device.uuid().to_string(), layout: 1, ..request(model) }
}

/// Attaches a model on the GPU, then answers one line of standard input at a time.
pub(crate) fn become_worker() -> ! {
    let directory = std::path::PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let selector = std::env::var(DEVICE).unwrap().parse().unwrap();
    let device = Device::open(cuda::open_driver().unwrap(), selector).unwrap();
    let asked = attach_request(&std::env::var(MODEL).unwrap(), &device);
    let attached = request_model(&directory.join("weights.sock"), &asked, |_| {}).unwrap();
    let attached = attached.import_cuda(&device).unwrap();
    println!("worker: attached {} {}", attached.lease.id(), checksum(&device, &attached.tensors));
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "check" => println!("worker: held {}", checksum(&device, &attached.tensors)),
            "lost" => {
                let deadline = Instant::now() + TEST_TIMEOUT;
                while !matches!(attached.lease.status(), LeaseStatus::Lost { .. }) {
                    assert!(Instant::now() < deadline, "{:?}", attached.lease.status());
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                println!("worker: {:?}", attached.lease.status());
            }
            "detach" => {
                let handoff::attach::AttachedModel { tensors, lease, .. } = attached;
                drop(tensors);
                drop(lease);
                println!("worker: detached");
                std::process::exit(0);
            }
            other => panic!("unknown command {other}"),
        }
    }
    std::process::exit(0);
}

fn worker(server: &TestServer, device: &Device) -> TestWorkerProcess {
    let uuid = device.uuid().to_string();
    TestWorkerProcess::start(server.directory.path(), "gpu-worker", &[(MODEL, "m"), (DEVICE, &uuid)])
}

fn integrity(status: &wire::Status) -> Vec<wire::GenerationIntegrity> {
    status.generations.iter().map(wire::Generation::integrity).collect()
}

/// Writes into a tensor of the FD store, as a faulty worker could; returns its name.
fn damage(server: &TestServer, device: &Device) -> String {
    let stored: BTreeMap<_, _> = server.fd_store.contents().into_iter().collect();
    let manifest = stored["g1.manifest"].try_clone().unwrap();
    let manifest = handoff::manifest::read_manifest(&SealedMemfd::verify(manifest).unwrap()).unwrap();
    let tensor = &manifest.tensors[2];
    let bytes = manifest.allocations[tensor.allocation].bytes;
    let context = device.context().unwrap();
    let physical =
        PhysicalMemory::import(device, &stored[&format!("g1.a{}", tensor.allocation)], bytes).unwrap();
    let mut range = AddressRange::reserve(device, bytes).unwrap();
    range.map(0, &physical).unwrap();
    range.set_access(0, bytes, cuda::DeviceAccess::ReadWrite).unwrap();
    range.write(&context, tensor.offset + tensor.bytes / 2, b"stray").unwrap();
    tensor.name.clone()
}

#[test]
fn model_is_loaded_attached_adopted_verified_quarantined_and_reloaded() {
    let Some(device) = first_device() else { return };
    let uuid = device.uuid().to_string();
    let config = format!("[[devices]]\nid = {uuid:?}\nbudget = \"8GiB\"");
    let mut server = TestServer::start(ServerOptions { config, ..ServerOptions::default() });
    let path = server.path("m.gguf");
    make_model(&path);

    let loaded = server.load_onto(&uuid, "m", &path).unwrap().generation.unwrap();
    assert_eq!((loaded.layout, loaded.integrity()), (1, wire::GenerationIntegrity::Loaded));
    assert!(!server.server_has_driver());
    let held = server.status().ledger.unwrap();
    let held = held.devices.iter().find(|row| row.device == uuid).unwrap().reserved_bytes;
    assert_eq!(held, loaded.allocation_bytes, "nothing of the load's own is left in the ledger");
    let expected = expected();
    let mut first = worker(&server, &device);
    assert_eq!(first.attached().1, expected);
    let whole = server.verify("m").unwrap();
    assert_eq!((whole.damaged_count, whole.checked_bytes), (0, loaded.tensor_bytes));

    // A worker that reads another layout is refused, and nothing stays reserved for it.
    let rows = server.status().ledger.unwrap().reservations.len();
    for layout in [0, 2] {
        let asked = AttachRequest { layout, ..attach_request("m", &device) };
        let refused = request_model(&server.socket(), &asked, |_| {}).unwrap_err().to_string();
        let both = format!("layout {layout} was asked for, model \"m\" has layout 1");
        assert!(refused.contains(&both), "{refused}");
    }
    assert_eq!(server.status().ledger.unwrap().reservations.len(), rows);
    println!("verified {} bytes in {:.2} s", whole.checked_bytes, whole.seconds);

    // The weight-server dies; its successor cannot read the file.
    let hidden = server.path("hidden.gguf");
    std::fs::rename(&path, &hidden).unwrap();
    server.kill_server();
    server.restart_server();
    server.wait_status("the successor's check", |status| {
        integrity(status) == [wire::GenerationIntegrity::Verified]
    });
    assert_eq!(worker(&server, &device).attached().1, expected);
    assert_eq!(first.command("check"), format!("held {expected}"));
    assert!(!server.server_has_driver());

    // The weights are damaged.
    std::fs::rename(&hidden, &path).unwrap();
    let damaged = damage(&server, &device);
    let found = server.verify("m").unwrap();
    assert_eq!((found.damaged_count, found.damaged), (1, vec![damaged]));
    assert!(first.command("lost").contains("Quarantined"));
    server.wait_status("the reloaded model", |status| {
        status.generations.iter().any(|generation| {
            generation.state() == wire::GenerationState::Ready
                && generation.integrity() == wire::GenerationIntegrity::Loaded
        })
    });
    let mut second = worker(&server, &device);
    assert_eq!(second.attached().1, expected);

    assert_eq!(second.command("detach"), "detached");
    first.kill();
    server.unload("m").unwrap();
    server.wait_status("an empty ledger", |status| status.ledger.as_ref().unwrap().reservations.is_empty());
    server.fd_store.wait_names(&[]);
}
