//! The process around the router: runtime, signals, readiness, exit codes.

use std::io;
use std::net::SocketAddr;

use service::exit::{HasExit, exit_for_io_error};
use service::metrics::{Metrics, MetricsError};
use service::{Exit, Notify, Shutdown};

use crate::config::{AdmissionConfigError, Config};
use crate::server::Router;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot start the runtime of the router")]
    Runtime(#[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Notify(#[from] service::notify::NotifyError),
    #[error(transparent)]
    Inherit(#[from] service::listen::ListenError),
    #[error("cannot use the inherited listening socket")]
    Inherited(#[source] io::Error),
    #[error("cannot listen on {address}{}", in_use(.address, .source))]
    Listen { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Socket(#[from] service::grpc::BindError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("cannot describe the gRPC services")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the router's configuration")]
    Admission(#[from] AdmissionConfigError),
    #[error("the gRPC server on router.sock failed")]
    Serve(#[source] tonic::transport::Error),
}

fn in_use(address: &SocketAddr, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            format!(": another process listens there; choose another port than {}", address.port())
        }
        _ => String::new(),
    }
}

impl HasExit for RunError {
    fn exit(&self) -> Exit {
        match self {
            RunError::Listen { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::Usage
            }
            RunError::Admission(_) => Exit::Usage,
            RunError::Listen { source, .. }
            | RunError::Runtime(source)
            | RunError::Signals(source)
            | RunError::Inherited(source) => exit_for_io_error(source),
            RunError::Notify(error) => error.exit(),
            RunError::Inherit(error) => error.exit(),
            RunError::Socket(error) => error.exit(),
            RunError::Metrics(_) | RunError::Reflection(_) | RunError::Serve(_) => Exit::Internal,
        }
    }
}

/// Runs the router until it has drained.
pub fn run(config: Config) -> Result<(), RunError> {
    service::logging::init("router", tracing::Level::INFO);
    // Before there are threads.
    let inherited = service::listen::inherited_fds()?.into_iter().next();
    let listener = inherited.map(|inherited| std::net::TcpListener::from(inherited.fd));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(RunError::Runtime)?;
    runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(RunError::Signals)?;
        let notify = Notify::from_env()?;
        let _supervisor = service::supervision::watch_supervisor("router", "router", &notify, &shutdown)?;
        let router = Router::bind(config, listener, Metrics::install()?).await?;
        let address =
            router.address().map_or("router.sock".to_owned(), |address| format!("http://{address}"));
        tracing::info!(%address, "listening");
        notify.status(&format!("listening on {address}"))?;
        notify.ready()?;
        let served = router.serve(&shutdown).await;
        notify.stopping()?;
        served
    })
}
