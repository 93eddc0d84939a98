// SPDX-License-Identifier: Apache-2.0

//! Owns the [`ConnectionTable`] of a listening socket: tells it about connections and requests that
//! begin and end, and closes those that it replaces.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::intake::{
    Arrival, ClientAddress, ClientConnection, ConnectionLimits, ConnectionTable, TcpConnectionId,
};

/// The open connections of one listening socket.
pub(crate) struct OpenConnections {
    start: Instant,
    state: Mutex<OpenState>,
    /// A connection ended or became idle.
    changed: Notify,
}

struct OpenState {
    table: ConnectionTable,
    /// Closes a connection.
    close: HashMap<TcpConnectionId, CancellationToken>,
}

/// A connection in the table. Dropping it removes the connection.
pub(crate) struct OpenConnection {
    open: Arc<OpenConnections>,
    pub(crate) client: ClientConnection,
    /// Cancelled when a new connection replaces this one.
    pub(crate) close: CancellationToken,
    /// Cancelled by the first request.
    pub(crate) has_request: CancellationToken,
    activity: Arc<Activity>,
}

/// The requests of one connection.
#[derive(Default)]
struct Activity {
    running: AtomicU32,
    is_http2: AtomicBool,
    /// A request began or ended.
    changed: Notify,
}

impl OpenConnections {
    pub(crate) fn new(limits: ConnectionLimits) -> Arc<Self> {
        let state = OpenState { table: ConnectionTable::new(limits), close: HashMap::new() };
        Arc::new(Self { start: Instant::now(), state: Mutex::new(state), changed: Notify::new() })
    }

    /// Waits while every connection is busy. `None` if the address is at its limit.
    pub(crate) async fn admit(self: &Arc<Self>, address: ClientAddress) -> Option<OpenConnection> {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            match self.arrive(address) {
                Arrival::Accept { id, .. } => {
                    let close = CancellationToken::new();
                    self.lock().close.insert(id, close.clone());
                    let (open, has_request) = (self.clone(), CancellationToken::new());
                    return Some(OpenConnection {
                        open,
                        client: ClientConnection { id, address },
                        close,
                        has_request,
                        activity: Arc::default(),
                    });
                }
                Arrival::AddressFull => return None,
                Arrival::Full => changed.await,
            }
        }
    }

    fn arrive(&self, address: ClientAddress) -> Arrival {
        let mut state = self.lock();
        let arrival = state.table.arrive(address, self.start.elapsed());
        if let Arrival::Accept { replaces: Some(replaced), .. } = arrival
            && let Some(close) = state.close.get(&replaced)
        {
            close.cancel();
        }
        arrival
    }

    fn lock(&self) -> MutexGuard<'_, OpenState> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnection {
    pub(crate) fn begin_request(&self, is_http2: bool) -> RunningRequest {
        self.has_request.cancel();
        self.open.lock().table.begin_request(self.client.id);
        self.activity.is_http2.fetch_or(is_http2, Ordering::Relaxed);
        self.activity.running.fetch_add(1, Ordering::Relaxed);
        self.activity.changed.notify_waiters();
        RunningRequest { open: self.open.clone(), id: self.client.id, activity: self.activity.clone() }
    }

    /// Returns when no request has run for this time, and at once for a connection of HTTP/2.
    pub(crate) async fn until_idle_for(&self, time: Duration) {
        let Activity { running, is_http2, changed } = &*self.activity;
        loop {
            let next = changed.notified();
            let mut next = std::pin::pin!(next);
            next.as_mut().enable();
            if is_http2.load(Ordering::Relaxed) {
                return;
            }
            let is_idle = running.load(Ordering::Relaxed) == 0;
            tokio::select! {
                biased;
                () = next => {}
                () = tokio::time::sleep(time), if is_idle => return,
            }
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut state = self.open.lock();
        state.table.remove(self.client.id);
        state.close.remove(&self.client.id);
        drop(state);
        self.open.changed.notify_one();
    }
}

/// A request, until its response is sent.
pub(crate) struct RunningRequest {
    open: Arc<OpenConnections>,
    id: TcpConnectionId,
    activity: Arc<Activity>,
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        let now = self.open.start.elapsed();
        self.open.lock().table.end_request(self.id, now);
        self.activity.running.fetch_sub(1, Ordering::Relaxed);
        self.activity.changed.notify_waiters();
        self.open.changed.notify_one();
    }
}

/// The body of a response. Its request runs until the body is dropped.
pub(crate) struct ResponseBody {
    pub(crate) body: Body,
    pub(crate) _running: RunningRequest,
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
