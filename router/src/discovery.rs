//! Finds workers: the runtime directory is the registry, a worker is a socket `worker-<N>.sock` in it.
//!
//! A socket's path and inode name one incarnation; each gets one [`crate::worker_link`] task, and another attempt after
//! that task has ended as long as the socket is there.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use service::RuntimeDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::fleet::Fleet;
use crate::worker_link;

/// A new worker is seen within this time.
const SCAN_EVERY: Duration = Duration::from_millis(100);
/// More sockets than this in one directory are not followed.
const WORKERS_MAX: usize = 64;

/// Runs until `stop`.
pub(crate) async fn run(directory: RuntimeDir, fleet: Arc<Fleet>, stop: CancellationToken) {
    let mut links: HashMap<(PathBuf, u64), JoinHandle<()>> = HashMap::new();
    let mut scan = tokio::time::interval(SCAN_EVERY);
    scan.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut unreadable = false;
    loop {
        tokio::select! {
            _ = scan.tick() => {}
            () = stop.cancelled() => break,
        }
        let sockets = match directory.worker_sockets() {
            Ok(sockets) => sockets,
            Err(error) => {
                if !std::mem::replace(&mut unreadable, true) {
                    tracing::warn!(directory = %directory.path().display(), %error, "cannot look for workers");
                }
                continue;
            }
        };
        unreadable = false;
        links.retain(|_, link| !link.is_finished());
        for (_, path) in sockets.into_iter().take(WORKERS_MAX) {
            // Gone between listing and looking: the next scan will not list it.
            let Ok(metadata) = std::fs::symlink_metadata(&path) else { continue };
            links
                .entry((path.clone(), metadata.ino()))
                .or_insert_with(|| tokio::spawn(worker_link::follow(path, fleet.clone(), stop.clone())));
        }
    }
}
