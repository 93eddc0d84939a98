// SPDX-License-Identifier: Apache-2.0

//! gRPC over Unix sockets, for the services between the processes of a fleet.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Interval, MissedTickBehavior, Sleep};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::{Channel, Endpoint, Server, server::Router};
use tonic_health::server::HealthReporter;

use crate::accept_failures::AcceptFailures;
use crate::exit::{Exit, HasExit, exit_for_io_error};
use crate::runtime_dir::SOCKET_PATH_BYTES_MAX;
use crate::socket_probe::probe_listener;
use crate::user::UserId;

/// Largest message that a service receives or sends. Vocabularies and logits are sent as streams of
/// smaller frames.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Connecting to a local socket takes microseconds. A stopped peer (SIGSTOP) would block it
/// forever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that does not answer HTTP/2 pings for this long counts as dead.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
const ROOT: UserId = UserId(0);
/// Unread bytes of one stream, after which its sender waits. 64 KiB are about 1,600 token frames.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// The largest that HTTP/2 has. The token streams of all clients share one connection per peer, so
/// a window of the connection would let slow streams delay others; the windows of the streams bound
/// the memory. h2 also derives a budget from it: half the window, for DATA frames below 256 bytes
/// that are not read yet. Each costs 256 bytes less its payload, and the connection with all its
/// streams ends once the budget is spent. An unread stream of 10-byte frames costs 1.6 MB, so that
/// 1 GiB lasts for 650 of them.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// How often a listener checks that its path exists. Cleaners of /tmp delete old sockets.
const PATH_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(
        "socket path {} has {} bytes, allowed are at most {SOCKET_PATH_BYTES_MAX}; choose a shorter directory",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong { path: PathBuf },
    #[error("socket {} is in use by a running process; stop it or choose another directory", path.display())]
    InUse { path: PathBuf },
    #[error("cannot bind socket {}", path.display())]
    Bind { path: PathBuf, source: io::Error },
}

impl HasExit for BindError {
    fn exit(&self) -> Exit {
        match self {
            BindError::Bind { source, .. } => exit_for_io_error(source),
            _ => Exit::AddressInUse,
        }
    }
}

/// A bound socket. If the path is deleted, the listener binds it again. Dropping the listener
/// removes the path, unless another process has bound it meanwhile.
#[derive(Debug)]
pub struct UdsListener {
    listener: UnixListener,
    path: Arc<BoundPath>,
    check: Interval,
    is_lost: bool,
    failures: AcceptFailures,
    /// Runs after a failed attempt to accept.
    pause: Option<Pin<Box<Sleep>>>,
    /// Users whose processes may call: this process's own, root, and those of [`Self::allow`].
    users: BTreeSet<UserId>,
}

impl UdsListener {
    /// Lets processes of these users call too.
    pub fn allow(mut self, users: &BTreeSet<UserId>) -> Self {
        self.users.extend(users);
        self
    }

    /// Binds the path again if nothing is there. Open connections are not affected.
    fn restore_path(&mut self) {
        let path = &self.path.path;
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Also if another process has bound the path: a successor does so.
            _ => return self.is_lost = false,
        }
        match UnixListener::bind(path).and_then(|listener| Ok((listener, inode(path)?))) {
            Ok((listener, inode)) => {
                tracing::warn!(socket = %path.display(), "the socket was deleted, it is bound again");
                self.listener = listener;
                self.path.inode.store(inode, Ordering::Relaxed);
                self.is_lost = false;
            }
            // The directory may be gone too. The supervisor creates it again.
            Err(error) if !std::mem::replace(&mut self.is_lost, true) => {
                tracing::warn!(socket = %path.display(), %error, "the socket was deleted and cannot be bound yet");
            }
            Err(_) => {}
        }
    }
}

/// Gives no errors: tonic would ask for the next connection at once.
impl Stream for UdsListener {
    type Item = UnixStream;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while self.check.poll_tick(context).is_ready() {
            self.restore_path();
        }
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            let error = match ready!(self.listener.poll_accept(context)) {
                Ok((stream, _)) => return Poll::Ready(Some(stream)),
                Err(error) => error,
            };
            let path = Arc::clone(&self.path);
            let wait = self.failures.failed(&path.path.to_string_lossy(), &error, Instant::now());
            self.pause = Some(Box::pin(tokio::time::sleep(wait)));
        }
    }
}

/// Removes the path of a bound socket on drop. The inode distinguishes the socket from a
/// successor's.
#[derive(Debug)]
struct BoundPath {
    path: PathBuf,
    inode: AtomicU64,
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == *self.inode.get_mut()) {
            // A failure is harmless: the next process binds over a dead socket.
            let _: io::Result<()> = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<u64> {
    std::fs::symlink_metadata(path).map(|metadata| metadata.ino())
}

/// Binds a stream socket at `path` and replaces the socket of a dead process. Call inside a tokio
/// runtime.
pub fn bind(path: &Path) -> Result<UdsListener, BindError> {
    clear_dead_socket(path)?;
    let failed = |source| BindError::Bind { path: path.to_owned(), source };
    let listener = UnixListener::bind(path).map_err(failed)?;
    let inode = AtomicU64::new(inode(path).map_err(failed)?);
    let path = Arc::new(BoundPath { path: path.to_owned(), inode });
    let mut check = tokio::time::interval(PATH_CHECK_INTERVAL);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Root can do everything anyway.
    let users = BTreeSet::from([UserId(rustix::process::geteuid().as_raw()), ROOT]);
    let failures = AcceptFailures::default();
    Ok(UdsListener { listener, path, check, is_lost: false, failures, pause: None, users })
}

/// Checks the length of a socket path and removes the socket of a dead process. A socket that
/// answers is an error.
pub fn clear_dead_socket(path: &Path) -> Result<(), BindError> {
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        return Err(BindError::PathTooLong { path: path.to_owned() });
    }
    let failed = |source| BindError::Bind { path: path.to_owned(), source };
    match probe_listener(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Either a socket without a listener, or a file of another kind, which stays.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            match std::fs::symlink_metadata(path).map_err(failed)?.file_type().is_socket() {
                true => std::fs::remove_file(path).map_err(failed),
                false => Err(failed(io::ErrorKind::AlreadyExists.into())),
            }
        }
        // Connected, or a listener of another type or with a full queue: a process is there.
        _ => Err(BindError::InUse { path: path.to_owned() }),
    }
}

/// A server with the limits of every service of a fleet.
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
}

type ServeFuture<'a> = Pin<Box<dyn Future<Output = Result<(), tonic::transport::Error>> + Send + 'a>>;
type ConnectFuture<'a> = Pin<Box<dyn Future<Output = Result<Channel, ConnectError>> + Send + 'a>>;

/// Serves until `stop` resolves, then until the last open stream ends. [`crate::Shutdown::within`]
/// can bound the second part.
pub fn serve<'a>(
    router: Router,
    listener: UdsListener,
    stop: impl Future<Output = ()> + Send + 'a,
) -> ServeFuture<'a> {
    serve_until(router, listener, Box::pin(stop))
}

/// Boxed and without type parameters, so that the HTTP/2 server is compiled once, in this crate.
/// The body of an `async fn` is compiled in each crate that awaits it.
fn serve_until(
    router: Router,
    listener: UdsListener,
    stop: Pin<Box<dyn Future<Output = ()> + Send + '_>>,
) -> ServeFuture<'_> {
    Box::pin(async move {
        // A draining process is still found under its path.
        let path = listener.path.clone();
        let users = listener.users.clone();
        let path = &path;
        let connections = listener.filter(move |connection| check_peer(connection, &users, &path.path));
        let connections = connections.map(Ok::<_, Infallible>);
        router.serve_with_incoming_shutdown(connections, stop).await
    })
}

/// Whether the peer is a process of one of these users. The modes of socket and directory say the
/// same, until they are changed.
fn check_peer(connection: &UnixStream, users: &BTreeSet<UserId>, path: &Path) -> bool {
    match connection.peer_cred() {
        Ok(peer) if users.contains(&UserId(peer.uid())) => true,
        Ok(peer) => {
            let (uid, pid, socket) = (peer.uid(), peer.pid(), path.display());
            tracing::warn!(uid, pid, %socket, "closed a connection of another user");
            false
        }
        // The peer is gone already.
        Err(_) => false,
    }
}

/// Why a peer cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot connect to {}", path.display())]
    Unreachable { path: PathBuf, source: tonic::transport::Error },
    #[error("cannot connect to {}: the process does not answer, it is stopped or overloaded", path.display())]
    FullQueue { path: PathBuf },
}

impl ConnectError {
    fn new(path: &Path, source: tonic::transport::Error) -> Self {
        let path = path.to_owned();
        match has_full_queue(&source) {
            true => Self::FullQueue { path },
            false => Self::Unreachable { path, source },
        }
    }
}

/// Whether the queue of the listener has no room (EAGAIN, see unix(7)).
fn has_full_queue(error: &tonic::transport::Error) -> bool {
    std::iter::successors(error.source(), |&cause| cause.source())
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::WouldBlock)
}

impl HasExit for ConnectError {
    fn exit(&self) -> Exit {
        Exit::PeerLost
    }
}

fn endpoint(path: &Path) -> Result<Endpoint, ConnectError> {
    let failed = |source| ConnectError::new(path, source);
    let endpoint = Endpoint::from_shared(format!("unix://{}", path.display())).map_err(failed)?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES))
}

/// Connects to the service at `path`. Fails if no process listens.
pub fn connect(path: &Path) -> ConnectFuture<'_> {
    Box::pin(async move { endpoint(path)?.connect().await.map_err(|source| ConnectError::new(path, source)) })
}

/// Connects at the first call, and again after the peer has restarted.
pub fn connect_lazy(path: &Path) -> Result<Channel, ConnectError> {
    Ok(endpoint(path)?.connect_lazy())
}

/// The service grpc.health.v1, and the reporter that sets which services serve.
pub fn health() -> (
    HealthReporter,
    tonic_health::pb::health_server::HealthServer<impl tonic_health::pb::health_server::Health>,
) {
    tonic_health::server::health_reporter()
}

/// Services that every port of gRPC serves.
const COMMON_SERVICES: [&str; 3] = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// gRPC reflection of `service`, with the encoded FileDescriptorSet of the `proto` crate, and of
/// the common services. Common clients still ask for v1alpha.
pub fn reflection(
    descriptors: &'static [u8],
    service: &str,
) -> Result<
    (
        tonic_reflection::server::v1::ServerReflectionServer<
            impl tonic_reflection::server::v1::ServerReflection,
        >,
        tonic_reflection::server::v1alpha::ServerReflectionServer<
            impl tonic_reflection::server::v1alpha::ServerReflection,
        >,
    ),
    tonic_reflection::server::Error,
> {
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(descriptors)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
            .include_reflection_service(false);
        COMMON_SERVICES
            .into_iter()
            .chain([service])
            .fold(builder, |builder, name| builder.with_service_name(name))
    };
    Ok((builder().build_v1()?, builder().build_v1alpha()?))
}

#[cfg(test)]
mod tests {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;
    use crate::Shutdown;

    #[tokio::test]
    async fn a_service_is_reachable_at_its_path_until_it_stops() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let shutdown = Shutdown::default();
        let (_reporter, health) = health();
        let listener = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(BindError::InUse { .. })));
        let server = tokio::spawn(serve(server().add_service(health), listener, shutdown.requested()));
        let mut client = HealthClient::new(connect(&path).await.unwrap());
        let answer = client.check(HealthCheckRequest::default()).await.unwrap().into_inner();
        assert_eq!(answer.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);
        drop(client);
        shutdown.request();
        server.await.unwrap().unwrap();
        assert!(!path.exists());
        assert!(connect(&path).await.is_err());
    }

    #[tokio::test]
    async fn a_deleted_socket_is_bound_again_also_after_its_directory() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("run");
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("x.sock");
        let shutdown = Shutdown::default();
        let (_reporter, health) = health();
        let listener = bind(&path).unwrap();
        let server = tokio::spawn(serve(server().add_service(health), listener, shutdown.requested()));
        let mut early = HealthClient::new(connect(&path).await.unwrap());
        std::fs::remove_dir_all(&directory).unwrap();
        tokio::time::sleep(PATH_CHECK_INTERVAL).await;
        std::fs::create_dir(&directory).unwrap();
        let late = loop {
            match connect(&path).await {
                Ok(channel) => break channel,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        early.check(HealthCheckRequest::default()).await.unwrap();
        HealthClient::new(late).check(HealthCheckRequest::default()).await.unwrap();
        drop(early);
        shutdown.request();
        server.await.unwrap().unwrap();
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn the_socket_of_a_dead_process_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(bind(&path).unwrap());
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_that_is_not_a_socket_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        std::fs::write(&path, "mine").unwrap();
        assert!(bind(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        let long = directory.path().join("y".repeat(120));
        assert!(matches!(bind(&long), Err(BindError::PathTooLong { .. })));
    }
}
