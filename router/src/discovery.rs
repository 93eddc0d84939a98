// SPDX-License-Identifier: Apache-2.0

//! Discovers workers: the runtime directory is the service registry, and a worker is a socket
//! `worker-<N>.sock` in it.
//!
//! The path and inode of a socket identify one run of a worker. Each gets one
//! [`crate::worker_link`] task. If that task ends and the socket still exists, a later scan starts
//! another one: the next scan, or after a pause if the router cannot serve the worker.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use service::RuntimeDir;
use service::runtime_dir::WORKERS_MAX;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::refused_workers::SocketId;
use crate::registry::WorkerRegistry;
use crate::worker_link;

/// The router discovers a new worker within this time.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);

/// Scans the directory until `stop`.
pub(crate) async fn run(directory: RuntimeDir, registry: Arc<WorkerRegistry>, stop: CancellationToken) {
    let mut links: HashMap<PathBuf, FollowedSocket> = HashMap::new();
    let mut scan = tokio::time::interval(SCAN_INTERVAL);
    scan.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut is_unreadable, mut has_excess) = (false, false);
    loop {
        tokio::select! {
            _ = scan.tick() => {}
            () = stop.cancelled() => break,
        }
        let sockets = match directory.worker_sockets() {
            Ok(sockets) => sockets,
            Err(error) => {
                if !std::mem::replace(&mut is_unreadable, true) {
                    tracing::warn!(directory = %directory.path().display(), %error, "cannot discover workers");
                }
                continue;
            }
        };
        is_unreadable = false;
        links.retain(|_, link| !link.task.is_finished());
        let followed = sockets.len().min(WORKERS_MAX as usize);
        if !std::mem::replace(&mut has_excess, sockets.len() > followed) && has_excess {
            let ignored = sockets.len() - followed;
            tracing::warn!(ignored, "more than {WORKERS_MAX} workers: the router does not use the others");
        }
        // A socket may vanish between the listing and its inspection. The next scan does not list
        // it.
        let inspect = |(_, path): (u32, PathBuf)| {
            let inode = std::fs::symlink_metadata(&path).ok()?.ino();
            Some((path, inode))
        };
        let sockets: HashSet<SocketId> = sockets.into_iter().take(followed).filter_map(inspect).collect();
        registry.retain_refused(|socket| sockets.contains(socket));
        registry.note_sockets(&sockets);
        for socket in sockets {
            let is_followed = links.get(&socket.0).is_some_and(|link| link.inode == socket.1);
            if is_followed || !registry.may_ask(&socket) {
                continue;
            }
            let link = FollowedSocket::start(socket.clone(), &registry, &stop);
            if let Some(earlier) = links.insert(socket.0, link) {
                // A new process, or the same one after its socket was deleted. Open streams of the
                // earlier link go on.
                earlier.stop.cancel();
            }
        }
    }
}

/// The link to the process that bound a socket.
struct FollowedSocket {
    inode: u64,
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl FollowedSocket {
    fn start(socket: SocketId, registry: &Arc<WorkerRegistry>, stop: &CancellationToken) -> Self {
        let (inode, stop) = (socket.1, stop.child_token());
        let task = tokio::spawn(worker_link::run(socket, registry.clone(), stop.clone()));
        Self { inode, task, stop }
    }
}
