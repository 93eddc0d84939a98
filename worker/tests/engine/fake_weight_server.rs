// SPDX-License-Identifier: Apache-2.0

//! A minimal weight-server: one model in one sealed memfd. Counts attached and adopted leases.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytes::Bytes;
use handoff::fd_batches::fd_batches;
use handoff::seqpacket::{Connection, Listener};
use memory::manifest::{Allocation, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};
use memory::memfd::SealedMemfd;
use proto::weights::v1::{self as wire, server_frame, worker_frame};

/// A whole model file in memory.
pub(crate) struct DemoModelFile {
    pub(crate) header: gguf::Header,
    pub(crate) bytes: Bytes,
}

impl DemoModelFile {
    /// The demo model of the repository.
    pub(crate) fn demo() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/pycoder-7m-q8_0.gguf");
        let bytes = Bytes::from(std::fs::read(path).unwrap());
        let header = gguf::Header::read(&bytes[..], bytes.len() as u64).unwrap();
        Self { header, bytes }
    }
}

pub(crate) struct FakeWeightServer {
    pub(crate) socket: PathBuf,
    model: Arc<ExportedModel>,
    running: Option<ServerThreads>,
    pub(crate) attached: Arc<AtomicUsize>,
    pub(crate) reclaimed: Arc<AtomicUsize>,
}

struct ExportedModel {
    manifest: SealedMemfd,
    weights: SealedMemfd,
}

struct ServerThreads {
    stop: Arc<AtomicBool>,
    acceptor: JoinHandle<()>,
    connections: Arc<Mutex<Vec<Connection>>>,
}

pub(crate) const MODEL: &str = "demo";
const GRANULE_BYTES: usize = 2 << 20;
const ACCEPT_POLL: std::time::Duration = std::time::Duration::from_millis(1);

impl FakeWeightServer {
    /// Loads the model. `start` serves it.
    pub(crate) fn new(directory: &Path, file: &DemoModelFile) -> Self {
        let data = &file.bytes[file.header.data_start() as usize..];
        let mut contents = data.to_vec();
        contents.resize(data.len().next_multiple_of(GRANULE_BYTES), 0);
        let weights = SealedMemfd::from_bytes("weights", &contents).unwrap();
        let tensors = file.header.tensors().iter().map(|tensor| TensorEntry {
            name: tensor.name.clone(),
            dtype: tensor.dtype.id(),
            layout: LAYOUT_GGML,
            shape: tensor.dims.clone(),
            shard: None,
            allocation: 0,
            offset: tensor.offset,
            bytes: tensor.bytes,
            raw_checksum: [0; 16],
            checksum: [0; 16],
        });
        let manifest = Manifest {
            model: MODEL.to_owned(),
            digest: [9; 32],
            generation: 1,
            files: vec![],
            devices: vec![ManifestDevice::host()],
            layout: LAYOUT_GGML,
            one_per_tensor: false,
            allocations: vec![Allocation { device: 0, bytes: weights.bytes(), inode: weights.inode() }],
            tensors: tensors.collect(),
            gguf_metadata: file.header.metadata().bytes().clone(),
            created_unix_seconds: 0,
        };
        let manifest = handoff::manifest::seal_manifest(&manifest).unwrap();
        Self {
            socket: directory.join("weights.sock"),
            model: Arc::new(ExportedModel { manifest, weights }),
            running: None,
            attached: Arc::default(),
            reclaimed: Arc::default(),
        }
    }

    pub(crate) fn start(&mut self) {
        match std::fs::remove_file(&self.socket) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
        }
        let listener = Listener::bind(&self.socket).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(Mutex::new(Vec::new()));
        let acceptor = {
            let (stop, connections, model) = (stop.clone(), connections.clone(), self.model.clone());
            let (attached, reclaimed) = (self.attached.clone(), self.reclaimed.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let Ok(connection) = listener.accept() else {
                        std::thread::sleep(ACCEPT_POLL);
                        continue;
                    };
                    connections.lock().unwrap().push(connection.try_clone().unwrap());
                    let (model, attached, reclaimed) = (model.clone(), attached.clone(), reclaimed.clone());
                    std::thread::spawn(move || serve_worker(&connection, &model, &attached, &reclaimed));
                }
            })
        };
        self.running = Some(ServerThreads { stop, acceptor, connections });
    }

    /// Behaves as a dead process: stops listening and closes every connection.
    pub(crate) fn kill(&mut self) {
        let Some(ServerThreads { stop, acceptor, connections }) = self.running.take() else { return };
        stop.store(true, Ordering::SeqCst);
        acceptor.join().unwrap();
        for connection in connections.lock().unwrap().drain(..) {
            connection.shutdown();
        }
    }
}

impl Drop for FakeWeightServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Serves one worker until its connection ends.
fn serve_worker(
    connection: &Connection,
    model: &ExportedModel,
    attached: &AtomicUsize,
    reclaimed: &AtomicUsize,
) -> Option<()> {
    let send = |kind, fds: &[std::os::fd::BorrowedFd<'_>]| {
        connection.send(&wire::ServerFrame { kind: Some(kind) }, fds).ok()
    };
    let receive = || connection.receive::<wire::WorkerFrame>().ok().and_then(|(frame, _)| frame.kind);
    match receive()? {
        worker_frame::Kind::Attach(attach) if attach.model == MODEL => {
            let fds = [model.manifest.as_fd(), model.weights.as_fd()];
            send(server_frame::Kind::Grant(wire::Grant { lease: 7, generation: 1, fds: 2 }), &[])?;
            for batch in fd_batches(2) {
                let range = batch.first as usize..(batch.first + batch.count) as usize;
                send(server_frame::Kind::Fds(batch), &fds[range])?;
                assert!(matches!(receive()?, worker_frame::Kind::BatchReceived(_)));
            }
            attached.fetch_add(1, Ordering::SeqCst);
        }
        worker_frame::Kind::Attach(_) => {
            let refused = wire::AttachRefused {
                reason: wire::RefusalReason::UnknownModel.into(),
                text: "no such model".into(),
            };
            return send(server_frame::Kind::Refused(refused), &[]);
        }
        worker_frame::Kind::Reclaim(reclaim) => {
            let answer = wire::Reclaimed { lease: reclaim.lease, generation: reclaim.generation };
            send(server_frame::Kind::Reclaimed(answer), &[])?;
            reclaimed.fetch_add(1, Ordering::SeqCst);
        }
        _ => return None,
    }
    while receive().is_some() {}
    Some(())
}
