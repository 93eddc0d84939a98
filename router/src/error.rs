// SPDX-License-Identifier: Apache-2.0

//! Why the router cannot start or serve, and its exit codes.

use std::io;
use std::net::SocketAddr;

use service::Exit;
use service::exit::{HasExit, exit_for_io_error};
use service::metrics::MetricsError;

use crate::access::KeyFileError;
use crate::config::AdmissionConfigError;
use crate::http::{HostError, OriginError};
use crate::limits::RouterLimitsError;
use crate::tls::TlsFileError;

#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("cannot start the runtime of the router")]
    Runtime(#[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Notify(#[from] service::notify::NotifyError),
    #[error(transparent)]
    Inherit(#[from] service::listen::ListenError),
    #[error(
        "{sockets} listening sockets are inherited and the router takes one; leave one ListenStream= in its socket unit"
    )]
    InheritedSockets { sockets: usize },
    #[error(
        "the inherited listening socket is not one of TCP; give an address and a port in ListenStream= of its socket unit"
    )]
    InheritedKind(#[source] io::Error),
    #[error("cannot use the inherited listening socket")]
    Inherited(#[source] io::Error),
    #[error("cannot start the thread of the usage log")]
    UsageLog(#[source] io::Error),
    #[error(transparent)]
    TlsFile(#[from] TlsFileError),
    #[error("cannot start the thread of the TLS files")]
    TlsThread(#[source] io::Error),
    #[error("cannot listen on {address}{}", address_in_use_hint(.address, .source))]
    Listen { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Socket(#[from] service::grpc::BindError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("cannot describe the gRPC services")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the router's configuration is invalid")]
    Admission(#[from] AdmissionConfigError),
    #[error("the router's configuration is invalid")]
    Limits(#[from] RouterLimitsError),
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    #[error("cannot start the thread of the key file")]
    KeyFileThread(#[source] io::Error),
    #[error(transparent)]
    Origins(#[from] OriginError),
    #[error(transparent)]
    Hosts(#[from] HostError),
    #[error(transparent)]
    Tracer(#[from] traces::TracerError),
    #[error("the gRPC server on router.sock failed")]
    Serve(#[source] tonic::transport::Error),
}

fn address_in_use_hint(address: &SocketAddr, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            format!(": another process listens there; choose another port than {}", address.port())
        }
        _ => String::new(),
    }
}

impl HasExit for RouterError {
    fn exit(&self) -> Exit {
        match self {
            RouterError::Listen { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::Usage
            }
            RouterError::InheritedSockets { .. }
            | RouterError::InheritedKind(_)
            | RouterError::Admission(_)
            | RouterError::Limits(_)
            | RouterError::Keys(_)
            | RouterError::TlsFile(_)
            | RouterError::Origins(_)
            | RouterError::Hosts(_) => Exit::Usage,
            RouterError::Listen { source, .. }
            | RouterError::Runtime(source)
            | RouterError::Signals(source)
            | RouterError::UsageLog(source)
            | RouterError::TlsThread(source)
            | RouterError::KeyFileThread(source)
            | RouterError::Inherited(source) => exit_for_io_error(source),
            RouterError::Notify(error) => error.exit(),
            RouterError::Inherit(error) => error.exit(),
            RouterError::Socket(error) => error.exit(),
            RouterError::Tracer(error) => error.exit(),
            RouterError::Metrics(_) | RouterError::Reflection(_) | RouterError::Serve(_) => Exit::Internal,
        }
    }
}
