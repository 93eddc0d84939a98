// SPDX-License-Identifier: Apache-2.0

//! A fake parent with an FD store: stores descriptors and reports its contents.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use handoff::fd_passing::recv_with_fds;

use crate::support::TEST_TIMEOUT;

/// A message that the store sends to itself.
const CATCH_UP: &str = "X_CATCH_UP";

/// The parent's side of the notify protocol, as the supervisor or systemd implements it.
#[derive(Clone)]
pub(crate) struct FakeFdStore {
    path: Arc<Path>,
    shared: Arc<(Mutex<FakeFdStoreState>, Condvar)>,
}

#[derive(Default)]
struct FakeFdStoreState {
    /// How many messages of `catch_up` have been handled.
    caught_up: u64,
    fds: Vec<(String, OwnedFd)>,
    /// Stores and removals, in order.
    log: Vec<String>,
    ready: u32,
    status: VecDeque<String>,
}

impl FakeFdStore {
    pub(crate) fn bind(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        let shared = Arc::new((Mutex::new(FakeFdStoreState::default()), Condvar::new()));
        let store = Self { path: path.into(), shared };
        let listener = store.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(received) = recv_with_fds(&socket, &mut buffer) {
                let text = String::from_utf8(buffer[..received.bytes].to_vec()).unwrap();
                listener.take(&text, received.fds);
            }
        });
        store
    }

    fn take(&self, text: &str, mut fds: Vec<OwnedFd>) {
        let (state, changed) = &*self.shared;
        let mut state = state.lock().unwrap();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let name = field("FDNAME").unwrap_or_default().to_owned();
        if field("FDSTORE").is_some() {
            assert_eq!(field("FDPOLL"), Some("0"));
            state.log.push(format!("+{name}"));
            state.fds.push((name, fds.remove(0)));
        } else if field("FDSTOREREMOVE").is_some() {
            state.log.push(format!("-{name}"));
            state.fds.retain(|(stored, _)| *stored != name);
        } else if let Some(status) = field("STATUS") {
            state.status.push_back(status.to_owned());
        } else if field("READY").is_some() {
            state.ready += 1;
        } else if field(CATCH_UP).is_some() {
            state.caught_up += 1;
        }
        changed.notify_all();
        // A barrier ends when its descriptor is dropped, which happens here.
    }

    fn wait<T>(&self, what: &str, check: impl Fn(&FakeFdStoreState) -> Option<T>) -> T {
        let (state, changed) = &*self.shared;
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut state = state.lock().unwrap();
        loop {
            if let Some(found) = check(&state) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what} did not come; the log is {:?}", state.log);
            state = changed.wait_timeout(state, left).unwrap().0;
        }
    }

    pub(crate) fn wait_ready(&self, times: u32) {
        self.wait("READY=1", |state| (state.ready >= times).then_some(()));
    }

    /// Waits until exactly these names are stored, in any order.
    pub(crate) fn wait_names(&self, expected: &[&str]) {
        let mut expected: Vec<&str> = expected.to_vec();
        expected.sort_unstable();
        self.wait(&format!("{expected:?}"), |state| {
            let mut names: Vec<&str> = state.fds.iter().map(|(name, _)| name.as_str()).collect();
            names.sort_unstable();
            (names == expected).then_some(())
        });
    }

    pub(crate) fn log(&self) -> Vec<String> {
        self.shared.0.lock().unwrap().log.clone()
    }

    /// Returns after all earlier messages are handled. A real parent also handles them before it
    /// starts the next process.
    fn catch_up(&self) {
        let before = self.shared.0.lock().unwrap().caught_up;
        let message = format!("{CATCH_UP}=1");
        UnixDatagram::unbound().unwrap().send_to(message.as_bytes(), &self.path).unwrap();
        self.wait("our own message", |state| (state.caught_up > before).then_some(()));
    }

    /// Copies of everything stored, as a restarted server inherits them.
    pub(crate) fn contents(&self) -> Vec<(String, OwnedFd)> {
        self.catch_up();
        let state = self.shared.0.lock().unwrap();
        state.fds.iter().map(|(name, fd)| (name.clone(), fd.try_clone().unwrap())).collect()
    }

    /// Adds a descriptor as if an earlier server had stored it.
    pub(crate) fn put(&self, name: &str, fd: OwnedFd) {
        self.shared.0.lock().unwrap().fds.push((name.to_owned(), fd));
    }

    pub(crate) fn remove(&self, name: &str) {
        self.shared.0.lock().unwrap().fds.retain(|(stored, _)| stored != name);
    }

    pub(crate) fn replace(&self, name: &str, fd: OwnedFd) {
        let mut state = self.shared.0.lock().unwrap();
        let slot = state.fds.iter_mut().find(|(stored, _)| stored == name).unwrap();
        slot.1 = fd;
    }
}
