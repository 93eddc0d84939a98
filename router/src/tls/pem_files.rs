// SPDX-License-Identifier: Apache-2.0

//! Reads the PEM files of TLS and makes the settings of rustls from them. Every error names the key
//! of the configuration and the file.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig};
use service::{Exit, HasExit};
use webpki::{EndEntityCert, KeyUsage};

use super::TlsConfig;

/// The roots of a whole operating system have a quarter of it.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// Clients of rustls refuse a handshake message above 64 KiB, those of OpenSSL one above 100 KiB.
const CHAIN_BYTES_MAX: usize = 60_000;

const CERTIFICATE: &str = "tls.certificate";
const KEY: &str = "tls.key";
const CLIENT_CA: &str = "tls.client-ca";

#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    #[error("cannot read `{setting}` {}, which must be a file that the router's user may read", path.display())]
    Read { setting: &'static str, path: PathBuf, source: io::Error },
    #[error("`{setting}` {} is not a regular file; name a PEM file", path.display())]
    Kind { setting: &'static str, path: PathBuf },
    #[error("`{setting}` {} has more than {PEM_BYTES_MAX} bytes; leave only what is needed in it", path.display())]
    TooLarge { setting: &'static str, path: PathBuf },
    #[error(
        "the certificates in `{CERTIFICATE}` {} have {bytes} bytes, and clients take {CHAIN_BYTES_MAX}; leave \
         only the server's certificate and those up to its root",
        path.display()
    )]
    ChainTooLong { path: PathBuf, bytes: usize },
    #[error("`{setting}` {} is not valid PEM, {reason}; write it again", path.display())]
    Pem { setting: &'static str, path: PathBuf, reason: &'static str },
    #[error("`{setting}` {} has no certificate; one begins with -----BEGIN CERTIFICATE-----", path.display())]
    NoCertificate { setting: &'static str, path: PathBuf },
    #[error("`{setting}` {} has a certificate that is not valid; write it again", path.display())]
    Certificate { setting: &'static str, path: PathBuf, source: rustls::Error },
    #[error(
        "`{KEY}` {} has no private key without a passphrase; `openssl pkey -in FILE -out NEW` writes one",
        path.display()
    )]
    NoKey { path: PathBuf },
    #[error(
        "`{KEY}` {} has a key of another kind than RSA with 2048 to 8192 bits, ECDSA with P-256 or P-384, \
         and Ed25519; make one of these",
        path.display()
    )]
    Key { path: PathBuf, source: rustls::Error },
    #[error(
        "the first certificate in `{CERTIFICATE}` {} is not that of `{KEY}` {}; write the server's own \
         certificate first, or name its key",
        certificate.display(), key.display()
    )]
    Mismatch { certificate: PathBuf, key: PathBuf },
}

impl HasExit for TlsFileError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }
}

/// What the files say.
pub(super) struct LoadedTls {
    pub(super) settings: Arc<ServerConfig>,
    /// The end of the validity of the server's certificate.
    pub(super) not_after: Option<UnixTime>,
}

/// Reads and checks all files. A certificate that has expired passes: refusing it would end a fleet
/// for a wrong clock, and clients refuse it anyway.
pub(super) fn load(config: &TlsConfig) -> Result<LoadedTls, TlsFileError> {
    let provider = Arc::new(ring::default_provider());
    let chain = read_certificates(CERTIFICATE, &config.certificate)?;
    let bytes = chain.iter().map(|certificate| certificate.len()).sum();
    if bytes > CHAIN_BYTES_MAX {
        return Err(TlsFileError::ChainTooLong { path: config.certificate.clone(), bytes });
    }
    let not_after = chain.first().and_then(not_after);
    let key = read_key(&config.key)?;
    let signing_key = provider
        .key_provider
        .load_private_key(key)
        .map_err(|source| TlsFileError::Key { path: config.key.clone(), source })?;
    let certified = CertifiedKey::new(chain, signing_key);
    match certified.keys_match() {
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => {}
        Err(rustls::Error::InconsistentKeys(_)) => {
            let (certificate, key) = (config.certificate.clone(), config.key.clone());
            return Err(TlsFileError::Mismatch { certificate, key });
        }
        Err(source) => {
            let path = config.certificate.clone();
            return Err(TlsFileError::Certificate { setting: CERTIFICATE, path, source });
        }
    }
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("ring has cipher suites of TLS 1.2 and 1.3");
    let builder = match &config.client_ca {
        Some(path) => builder.with_client_cert_verifier(client_verifier(path, provider)?),
        None => builder.with_no_client_auth(),
    };
    let mut settings = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    settings.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(LoadedTls { settings: Arc::new(settings), not_after })
}

/// Refuses clients without a certificate that a root in the file has signed.
fn client_verifier(
    path: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsFileError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(CLIENT_CA, path)? {
        roots.add(certificate).map_err(|source| TlsFileError::Certificate {
            setting: CLIENT_CA,
            path: path.to_owned(),
            source,
        })?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
    Ok(verifier.expect("there is a root, and there are no revocation lists"))
}

fn read_certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let text = read_file(setting, path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|error| pem_error(setting, path, &error))?;
    match certificates.is_empty() {
        true => Err(TlsFileError::NoCertificate { setting, path: path.to_owned() }),
        false => Ok(certificates),
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsFileError> {
    match PrivateKeyDer::from_pem_slice(&read_file(KEY, path)?) {
        Ok(key) => Ok(key),
        Err(pem::Error::NoItemsFound) => Err(TlsFileError::NoKey { path: path.to_owned() }),
        Err(error) => Err(pem_error(KEY, path, &error)),
    }
}

/// The error itself would show bytes of the file, which may be those of a key.
fn pem_error(setting: &'static str, path: &Path, error: &pem::Error) -> TlsFileError {
    let reason = match error {
        pem::Error::MissingSectionEnd { .. } => "the END line of a section is missing",
        pem::Error::IllegalSectionStart { .. } => "a BEGIN line is incomplete",
        _ => "a section is not Base64",
    };
    TlsFileError::Pem { setting, path: path.to_owned(), reason }
}

/// Reads a file whole. Anything but a regular file might never end, or never begin.
fn read_file(setting: &'static str, path: &Path) -> Result<Vec<u8>, TlsFileError> {
    let failed = |source| TlsFileError::Read { setting, path: path.to_owned(), source };
    // Without O_NONBLOCK, opening a FIFO would wait for a writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(TlsFileError::Kind { setting, path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    // One byte more than allowed shows that a file is too long.
    file.take(PEM_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > PEM_BYTES_MAX {
        true => Err(TlsFileError::TooLarge { setting, path: path.to_owned() }),
        false => Ok(bytes),
    }
}

/// The end of a certificate's validity. The library tells it only when it verifies the certificate
/// for a later time.
fn not_after(certificate: &CertificateDer<'_>) -> Option<UnixTime> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    let last = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
    let usage = KeyUsage::server_auth();
    match certificate.verify_for_usage(&[], &[], &[], last, usage, None, None) {
        Err(webpki::Error::CertExpired { not_after, .. }) => Some(not_after),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tls").join(name)
    }

    fn valid() -> TlsConfig {
        let client_ca = Some(test_file("ca.pem"));
        TlsConfig { certificate: test_file("server.pem"), key: test_file("server.key"), client_ca }
    }

    #[test]
    fn the_end_of_validity_is_known() {
        let of = |certificate| {
            let config = TlsConfig { certificate: test_file(certificate), ..valid() };
            load(&config).unwrap().not_after.unwrap().as_secs()
        };
        // 2121-01-01 and 2021-01-01, as the script beside the files says.
        assert_eq!((of("server.pem"), of("expired.pem")), (4_765_132_800, 1_609_459_200));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| {
            let path = directory.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let certificate = std::fs::read(test_file("server.pem")).unwrap();
        let long = file("long.pem", &certificate.repeat(CHAIN_BYTES_MAX / 420 + 1));
        let cut = file("cut.pem", &certificate[..certificate.len() / 2]);
        let wrong_der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let wrong_der = file("der.pem", wrong_der.as_bytes());
        let not_base64 = file("a.pem", b"-----BEGIN PRIVATE KEY-----\n%%\n-----END PRIVATE KEY-----\n");
        let key_der = file("k.pem", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        let large = file("large.pem", &vec![b'\n'; PEM_BYTES_MAX as usize + 1]);
        let empty = file("empty.pem", b"");
        let fifo = directory.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let missing = directory.path().join("missing.pem");

        let certificate = |certificate: &Path| TlsConfig { certificate: certificate.to_owned(), ..valid() };
        let key = |key: &Path| TlsConfig { key: key.to_owned(), ..valid() };
        let ca = |ca: &Path| TlsConfig { client_ca: Some(ca.to_owned()), ..valid() };
        let cases = [
            (certificate(&missing), "cannot read `tls.certificate`", "missing.pem"),
            (certificate(directory.path()), "not a regular file", "tls.certificate"),
            (certificate(&cut), "END line", "cut.pem"),
            (certificate(&long), "clients take 60000", "long.pem"),
            (certificate(&wrong_der), "not valid", "`tls.certificate`"),
            (certificate(&test_file("server.key")), "no certificate", "server.key"),
            (certificate(&test_file("client.pem")), "is not that of `tls.key`", "client.pem"),
            (key(&fifo), "not a regular file", "fifo"),
            (key(&large), "more than 1048576 bytes", "large.pem"),
            (key(&empty), "openssl pkey", "empty.pem"),
            (key(&not_base64), "not Base64", "a.pem"),
            (key(&key_der), "ECDSA with P-256", "k.pem"),
            (key(&test_file("server.pem")), "no private key", "server.pem"),
            (ca(&empty), "`tls.client-ca`", "no certificate"),
            (ca(&wrong_der), "`tls.client-ca`", "not valid"),
        ];
        for (config, first, second) in cases {
            let error = config.check().unwrap_err();
            assert_eq!(error.exit(), Exit::Usage);
            let text = service::exit::one_line(&error);
            assert!(text.contains(first) && text.contains(second), "{text}");
        }
        valid().check().unwrap();
    }
}
