// SPDX-License-Identifier: Apache-2.0

//! Measures loads onto a GPU from shared memory, from the page cache and from the disk. The goals
//! are shares of what each source delivers. With a file argument, only that file is loaded.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cuda::{Device, DeviceSelector};
use handoff::attach::{AttachRequest, request_model};
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{LoadRequest, UnloadRequest};
use quant::DType;
use rustix::fs::{Advice, fadvise};
use tonic::transport::Channel;

use crate::{connect, load, start_server, write_model};

/// Roughly an 8B model in 4 bits: tensors of 28 MB.
const DIMS: [u64; 2] = [4096, 12_288];
const TENSORS: u64 = 160;

const ROUNDS: usize = 5;

pub(crate) fn run(model: Option<PathBuf>) {
    let opened = cuda::open_driver().map_err(|error| error.to_string()).and_then(|driver| {
        Device::open(driver, DeviceSelector::Ordinal(0)).map_err(|error| error.to_string())
    });
    let device = match opened {
        Ok(device) => device,
        Err(error) => return println!("SKIPPED: loads onto a GPU: {error}"),
    };
    let directory = tempfile::tempdir().unwrap();
    let uuid = device.uuid();
    start_server(directory.path(), &format!("[[devices]]\nid = \"{uuid}\"\nbudget = \"64GiB\""));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut admin = runtime.block_on(connect(directory.path()));
    if let Some(path) = model {
        for _ in 0..ROUNDS {
            runtime.block_on(once("the file", &path, &device, directory.path(), &mut admin));
        }
        return;
    }
    let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let on_disk = std::env::current_exe().unwrap().with_file_name("load-bench.gguf");
    type Prepare = fn(&Path);
    let sources: [(&str, PathBuf, Prepare); 3] = [
        ("/dev/shm", in_memory.path().join("m.gguf"), |_| ()),
        ("page cache", on_disk.clone(), |path| _ = read_whole(path)),
        ("disk", on_disk.clone(), drop_cached),
    ];
    for (name, path, prepare) in sources {
        if !path.exists() {
            write_model(&path, DType::Q4_K, &DIMS, TENSORS);
            File::open(&path).unwrap().sync_all().unwrap();
        }
        for _ in 0..ROUNDS {
            prepare(&path);
            runtime.block_on(once(name, &path, &device, directory.path(), &mut admin));
        }
    }
    drop_cached(&on_disk);
    println!("disk, plain reads of 8 MiB in 8 threads: {:.2} GB/s", read_whole(&on_disk));
    std::fs::remove_file(&on_disk).unwrap();
}

async fn once(
    name: &str,
    path: &Path,
    device: &Device,
    directory: &Path,
    admin: &mut WeightServerClient<Channel>,
) {
    let request = LoadRequest {
        model: "m".to_owned(),
        path: path.to_str().unwrap().to_owned(),
        device: device.uuid().to_string(),
        ..LoadRequest::default()
    };
    let (loaded, took) = load(admin, request).await;
    let asked = AttachRequest {
        model: "m".to_owned(),
        device: device.uuid().to_string(),
        layout: 1,
        token: None,
        kv_bytes: 0,
        workspace_bytes: 0,
    };
    let (socket, device) = (directory.join("weights.sock"), device.clone());
    let attach = move || request_model(&socket, &asked, |_| {}).unwrap().import_cuda(&device).unwrap();
    let attached = tokio::task::spawn_blocking(attach).await.unwrap();
    println!(
        "GPU from {name}: {:.2} GB in {took:.2?} = {:.1} GB/s with everything; {} allocations attached in {:.2?} + {:.2?}",
        loaded.tensor_bytes as f64 / 1e9,
        loaded.tensor_bytes as f64 / 1e9 / took.as_secs_f64(),
        loaded.allocations,
        attached.waited,
        attached.handoff,
    );
    drop(attached);
    admin.unload(UnloadRequest { model: "m".to_owned(), generation: 0 }).await.unwrap();
}

fn drop_cached(path: &Path) {
    fadvise(File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
}

/// Reads a whole file, which fills the page cache. Returns the rate in GB/s.
fn read_whole(path: &Path) -> f64 {
    const THREADS: u64 = 8;
    let bytes = path.metadata().unwrap().len();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                use std::io::{Seek, SeekFrom};
                let (from, to) = (bytes * thread / THREADS, bytes * (thread + 1) / THREADS);
                let mut file = File::open(path).unwrap();
                file.seek(SeekFrom::Start(from)).unwrap();
                let mut part = file.take(to - from);
                let mut buffer = vec![0; 8 << 20];
                while part.read(&mut buffer).unwrap() > 0 {}
            });
        }
    });
    bytes as f64 / started.elapsed().as_secs_f64() / 1e9
}
