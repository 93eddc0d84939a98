// SPDX-License-Identifier: Apache-2.0

//! Handshakes with clients, and the thread that looks for new files.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::ServerConfig;
use rustls::pki_types::UnixTime;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::TlsConfig;
use super::file_changes::FileChanges;
use super::pem_files::{self, LoadedTls};
use crate::error::RouterError;
use crate::metrics;

/// From the start of a connection to the end of its handshake. A handshake is two round trips, so
/// this is for lossy networks; a client that sends nothing has its connection for as long.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Two looks find a change.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("the TLS handshake failed")]
    Failed(#[source] io::Error),
    #[error("the TLS handshake took longer than {HANDSHAKE_TIMEOUT:?}")]
    TooSlow,
}

/// TLS of the public address.
#[derive(Debug)]
pub(crate) struct PublicTls {
    config: TlsConfig,
    /// Of new connections. A connection keeps the settings of its handshake.
    settings: Mutex<Arc<ServerConfig>>,
}

impl PublicTls {
    /// Reads the files, and starts the thread that looks for new ones.
    pub(crate) fn start(config: TlsConfig) -> Result<Arc<Self>, RouterError> {
        // Found before the files are read: what changes in between is read again.
        let found = look(&config);
        let loaded = pem_files::load(&config)?;
        report_validity(loaded.not_after);
        let tls = Arc::new(Self { config, settings: loaded.settings.into() });
        let watched = Arc::downgrade(&tls);
        // A file system that does not answer stops this thread and nothing else.
        let thread = std::thread::Builder::new().name("tls-files".to_owned());
        thread.spawn(move || watch(&watched, FileChanges::new(found))).map_err(RouterError::TlsThread)?;
        Ok(tls)
    }

    /// Does the handshake. An error has sent its alert.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, HandshakeError> {
        let acceptor = TlsAcceptor::from(self.lock().clone());
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => {
                metrics::record_failed_handshake("failed");
                Err(HandshakeError::Failed(error))
            }
            Err(_) => {
                metrics::record_failed_handshake("timeout");
                Err(HandshakeError::TooSlow)
            }
        }
    }

    fn reload(&self) {
        match pem_files::load(&self.config) {
            Ok(LoadedTls { settings, not_after }) => {
                *self.lock() = settings;
                tracing::info!("new connections use the new TLS files");
                report_validity(not_after);
            }
            Err(error) => {
                let error = service::exit::one_line(&error);
                tracing::error!(error, "the TLS certificate stays as it was");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<ServerConfig>> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at the files until the router is gone.
fn watch(watched: &Weak<PublicTls>, mut changes: FileChanges<Files>) {
    loop {
        std::thread::sleep(LOOK_INTERVAL);
        let Some(tls) = watched.upgrade() else { return };
        if changes.observe(look(&tls.config)) {
            tls.reload();
        }
    }
}

/// Device, inode and time of the last change of content, mode or owner. So a file that could not be
/// read is read again after `chmod`.
type FileVersion = (u64, u64, i64, i64);
/// `None` for a file that is missing.
type Files = [Option<FileVersion>; 3];

fn look(config: &TlsConfig) -> Files {
    let version = |file: &Metadata| (file.dev(), file.ino(), file.ctime(), file.ctime_nsec());
    let of = |path: &Path| std::fs::metadata(path).ok().as_ref().map(version);
    [of(&config.certificate), of(&config.key), config.client_ca.as_deref().and_then(of)]
}

fn report_validity(not_after: Option<UnixTime>) {
    let Some(not_after) = not_after.map(|end| end.as_secs()) else { return };
    metrics::record_certificate_expiry(not_after);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if not_after < now {
        let days = (now - not_after) / (24 * 60 * 60);
        tracing::warn!(days, "the TLS certificate has expired; clients that check it refuse it");
    }
}
