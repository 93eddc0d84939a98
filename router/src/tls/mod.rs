// SPDX-License-Identifier: Apache-2.0

//! TLS of the public address: certificate and key from PEM files, handshakes with a deadline, and
//! new files while the router serves.
//!
//! ```text
//! pem_files     reads and checks the files, makes the settings of rustls
//! public_tls    handshakes; a thread that looks for new files
//! file_changes  when new files are complete (pure)
//! ```

mod file_changes;
mod pem_files;
mod public_tls;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use pem_files::TlsFileError;
pub(crate) use public_tls::{HandshakeError, PublicTls};

/// The files of TLS. All of them are PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TlsConfig {
    /// The server's certificate, then those between it and its root.
    pub certificate: PathBuf,
    /// The private key of the first certificate, without a passphrase.
    pub key: PathBuf,
    /// The roots of the clients' certificates. If absent, clients need no certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
}

impl TlsConfig {
    /// The same with paths relative to `base`.
    pub fn below(&self, base: &Path) -> Self {
        self.map(|path| base.join(path))
    }

    /// The same with absolute paths, for a process with another directory. A path that cannot be
    /// made absolute stays as it is.
    pub fn absolute(&self) -> Self {
        self.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }

    /// Reads and checks the files as the router does.
    pub fn check(&self) -> Result<(), TlsFileError> {
        pem_files::load(self).map(drop)
    }

    fn map(&self, change: impl Fn(&Path) -> PathBuf) -> Self {
        Self {
            certificate: change(&self.certificate),
            key: change(&self.key),
            client_ca: self.client_ca.as_deref().map(change),
        }
    }
}
