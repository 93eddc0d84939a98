// SPDX-License-Identifier: Apache-2.0

//! Measures how fast a model becomes resident, on the host and on a GPU if there is one, and how
//! fast a worker attaches.
//!
//! `cargo bench -p weight-server [--features cuda] [-- host | gpu [MODEL.gguf]]`.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement prints, and ends where it cannot go on"
)]

mod gpu;

use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use handoff::attach::{AttachRequest, attach};
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{Generation, LoadRequest, UnloadRequest, load_event};
use quant::DType;
use tonic::transport::Channel;
use weight_server::{LoaderProgram, WeightServerConfig};

const ROLE: &str = "BALLAST_BENCH_LOADER";

/// The shape of a 0.6B model in 8 bits: tensors of a few megabytes.
const TENSORS: u64 = 200;
const TENSOR_VALUES: u64 = 3 * 1024 * 1024 / 4 + 1000;
const ROUNDS: u32 = 5;

fn main() {
    if std::env::var_os(ROLE).is_some() {
        // The loader's log breaks a load onto a GPU down into stages.
        service::logging::init("loader", tracing::Level::INFO);
        return weight_server::loader::run().unwrap();
    }
    let mut words = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let (wanted, model) = (words.next().unwrap_or_default(), words.next());
    if "host".starts_with(&wanted) {
        host();
    }
    if "gpu".starts_with(&wanted) {
        gpu::run(model.map(Into::into));
    }
}

fn host() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("m.gguf");
    write_model(&model, DType::F32, &[TENSOR_VALUES], TENSORS);
    start_server(directory.path(), "");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(measure(directory.path(), &model));
}

/// A weight-server in this process, whose loaders run this executable.
fn start_server(directory: &Path, options: &str) {
    let config: WeightServerConfig =
        toml::from_str(&format!("runtime-dir = {directory:?}\n{options}")).unwrap();
    let loader = LoaderProgram {
        program: std::env::current_exe().unwrap(),
        arguments: Vec::new(),
        environment: vec![(ROLE.to_owned(), String::new())],
    };
    std::thread::spawn(move || weight_server::run_with_loader(config, loader).unwrap());
}

/// Writes tensors of one shape; their bytes do not repeat at short distances.
fn write_model(path: &Path, dtype: DType, dims: &[u64], tensors: u64) {
    let mut metadata = gguf::MetadataBuilder::default();
    metadata.put("tokenizer.ggml.model", "none").unwrap();
    let mut layout = gguf::TensorLayout::default();
    for index in 0..tensors {
        layout.add(&format!("blk.{index}.weight"), dtype, dims).unwrap();
    }
    let mut writer =
        gguf::GgufWriter::start(BufWriter::new(std::fs::File::create(path).unwrap()), &metadata, layout)
            .unwrap();
    let bytes = dtype.row_bytes(dims[0]).unwrap() * dims.iter().skip(1).product::<u64>();
    let tensor: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
    for _ in 0..tensors {
        writer.write(&tensor).unwrap();
    }
    writer.finish().unwrap().flush().unwrap();
}

async fn connect(directory: &Path) -> WeightServerClient<Channel> {
    loop {
        match service::grpc::connect(&directory.join("weights-admin.sock")).await {
            Ok(channel) => return WeightServerClient::new(channel),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Requests a load and waits for its end.
async fn load(admin: &mut WeightServerClient<Channel>, request: LoadRequest) -> (Generation, Duration) {
    let started = Instant::now();
    let mut events = admin.load(request).await.unwrap().into_inner();
    loop {
        if let Some(load_event::Kind::Loaded(loaded)) = events.message().await.unwrap().unwrap().kind {
            return (loaded.generation.unwrap(), started.elapsed());
        }
    }
}

async fn measure(directory: &Path, model: &Path) {
    let mut admin = connect(directory).await;
    for no_packing in [false, true] {
        for _ in 0..ROUNDS {
            let path = model.to_str().unwrap().to_owned();
            let request = LoadRequest { model: "m".to_owned(), path, no_packing, ..LoadRequest::default() };
            let (loaded, took) = load(&mut admin, request).await;
            let socket = directory.join("weights.sock");
            let attached =
                tokio::task::spawn_blocking(move || attach(&socket, &request_m(), |_| {}).unwrap());
            let attached = attached.await.unwrap();
            println!(
                "{:4} allocations: {:.2} GB in {took:.0?} = {:.2} GB/s; waste {:.2}%; attached in {:.2?} + {:.2?}",
                loaded.allocations,
                loaded.tensor_bytes as f64 / 1e9,
                loaded.tensor_bytes as f64 / 1e9 / took.as_secs_f64(),
                100.0 * (loaded.allocation_bytes as f64 / loaded.tensor_bytes as f64 - 1.0),
                attached.waited,
                attached.handoff,
            );
            drop(attached);
            admin.unload(UnloadRequest { model: "m".to_owned(), generation: 0 }).await.unwrap();
        }
    }
}

fn request_m() -> AttachRequest {
    AttachRequest {
        model: "m".to_owned(),
        device: "host".to_owned(),
        layout: 0,
        token: None,
        kv_bytes: 0,
        workspace_bytes: 0,
    }
}
