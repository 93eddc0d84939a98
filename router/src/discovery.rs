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
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::refused_workers::SocketId;
use crate::registry::WorkerRegistry;
use crate::worker_link;

/// The router discovers a new worker within this time.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of sockets that the router follows in one directory.
const WORKERS_MAX: usize = 64;

/// Scans the directory until `stop`.
pub(crate) async fn run(directory: RuntimeDir, registry: Arc<WorkerRegistry>, stop: CancellationToken) {
    let mut links: HashMap<SocketId, JoinHandle<()>> = HashMap::new();
    let mut scan = tokio::time::interval(SCAN_INTERVAL);
    scan.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut is_unreadable = false;
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
        links.retain(|_, link| !link.is_finished());
        // A socket may vanish between the listing and its inspection. The next scan does not list
        // it.
        let inspect = |(_, path): (u32, PathBuf)| {
            let inode = std::fs::symlink_metadata(&path).ok()?.ino();
            Some((path, inode))
        };
        let sockets: HashSet<SocketId> = sockets.into_iter().take(WORKERS_MAX).filter_map(inspect).collect();
        registry.retain_refused(|socket| sockets.contains(socket));
        for socket in sockets {
            if !links.contains_key(&socket) && registry.may_ask(&socket) {
                let link = worker_link::run(socket.clone(), registry.clone(), stop.clone());
                links.insert(socket, tokio::spawn(link));
            }
        }
    }
}
