// SPDX-License-Identifier: Apache-2.0

//! The listening sockets: TCP, perhaps with TLS, for HTTP/1.1 and HTTP/2 (OpenAI routes and gRPC),
//! `router.sock` for the same without TLS and keys, and a TCP address for health and metrics if one
//! is configured.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use axum::middleware;
use proto::v1::inference_server::InferenceServer;
use service::grpc::UdsListener;
use service::metrics::Metrics;
use service::{RuntimeDir, Shutdown};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tower::Layer;
use tower::util::MapRequestLayer;
use traces::Tracer;

use crate::access_control::{AccessController, require_key};
use crate::access_log::log_access;
use crate::admission_control::AdmissionController;
use crate::config::RouterConfig;
use crate::discovery;
use crate::dispatch::Dispatcher;
use crate::error::RouterError;
use crate::fleet_watch::FleetWatch;
use crate::generate::Generator;
use crate::grammar_check::GrammarChecker;
use crate::grpc::InferenceService;
use crate::http::{
    self, AllowedOrigins, AppState, OwnNames, UnknownFields, check_host, check_origin, shape_errors,
    trim_slash,
};
use crate::intake::{BodyLimits, SharedBudget, limit_request_body};
use crate::listener::{self, ListenerLimits};
use crate::quarantine_control::QuarantineController;
use crate::registry::WorkerRegistry;
use crate::request_id::identify;
use crate::tenant::TenantResolver;
use crate::tls::PublicTls;
use crate::usage_log::UsageLog;

/// The length prefix of a gRPC message, which counts in the body of a call.
const GRPC_PREFIX_BYTES: u64 = 5;

/// The name under which the public service reports its health.
const HEALTH_SERVICE: &str = "ballast.v1.Inference";

/// A router with its sockets bound.
pub struct Router {
    config: RouterConfig,
    tcp: Option<TcpListener>,
    health: Option<TcpListener>,
    socket: UdsListener,
    generator: Generator,
    access: Option<Arc<AccessController>>,
    tls: Option<Arc<PublicTls>>,
    own_names: OwnNames,
    metrics: Metrics,
    tracer: Tracer,
}

impl Router {
    /// Binds the sockets. `inherited` is a listening socket that replaces `config.listen`.
    pub async fn bind(
        config: RouterConfig,
        inherited: Option<std::net::TcpListener>,
        metrics: Metrics,
    ) -> Result<Self, RouterError> {
        config.admission.check()?;
        config.limits.check()?;
        let access = config.access.keys.clone().map(AccessController::start).transpose()?;
        let origins = AllowedOrigins::new(&config.access.origins)?;
        let own_names = OwnNames::new(origins, &config.access.hosts)?;
        let tls = config.tls.clone().map(PublicTls::start).transpose()?;
        let tcp = match inherited {
            Some(listener) => Some(to_tokio_listener(listener).map_err(RouterError::Inherited)?),
            None => listen(config.listen).await?,
        };
        let tracer = Tracer::start(config.tracing.as_ref(), "ballast-router", "router")?;
        let health = listen(config.limits.health_listen).await?;
        let socket = service::grpc::bind(&RuntimeDir::at(&config.runtime_dir).router_socket())?;
        let registry = WorkerRegistry::new(config.routing.mode);
        let usage_log = config.access.usage_log.clone().map(UsageLog::start).transpose();
        let quarantine = QuarantineController::new(config.limits.quarantine);
        let dispatcher = Dispatcher { registry: registry.clone(), quarantine };
        let generator = Generator {
            admission: AdmissionController::new(registry.clone(), config.admission.limits(&config.limits)),
            grammars: GrammarChecker::new(dispatcher.clone()),
            registry,
            dispatcher,
            tenants: TenantResolver::default(),
            request_timeout: config.limits.request_timeout,
            usage_log: usage_log.map_err(RouterError::UsageLog)?,
        };
        Ok(Self { config, tcp, health, socket, generator, access, tls, own_names, metrics, tracer })
    }

    /// The scheme of the TCP address in URLs.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The TCP address. If the configured port is 0, it has the port that the kernel chose.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// A second descriptor of the TCP socket.
    pub(crate) fn public_socket(&self) -> io::Result<Option<OwnedFd>> {
        self.tcp.as_ref().map(|tcp| tcp.as_fd().try_clone_to_owned()).transpose()
    }

    /// The address of `health-listen`.
    pub fn health_address(&self) -> Option<SocketAddr> {
        self.health.as_ref().and_then(|health| health.local_addr().ok())
    }

    pub(crate) fn usage_log(&self) -> Option<Arc<UsageLog>> {
        self.generator.usage_log.clone()
    }

    pub(crate) fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }

    pub(crate) fn registry(&self) -> Arc<WorkerRegistry> {
        self.generator.registry.clone()
    }

    /// Serves until a stop is requested and all streams have ended, or the drain time is over.
    pub async fn serve(self, shutdown: &Shutdown) -> Result<(), RouterError> {
        let Router { config, tcp, health, socket, generator, access, tls, own_names, metrics, tracer } = self;
        // Links to workers stay until the last stream has ended: a draining router still fails
        // over.
        let links = CancellationToken::new();
        let discovery = tokio::spawn(discovery::run(
            RuntimeDir::at(&config.runtime_dir),
            generator.registry.clone(),
            links.clone(),
        ));

        let fleet = FleetWatch::default();
        let watched = tokio::spawn(fleet.clone().run(
            RuntimeDir::at(&config.runtime_dir),
            generator.registry.clone(),
            links.clone(),
        ));
        let admission = tokio::spawn(generator.admission.clone().run(links.clone()));
        let admission_control = generator.admission.clone();
        let (health_status, health_service) = service::grpc::health();
        health_status.set_service_status(HEALTH_SERVICE, tonic_health::ServingStatus::NotServing).await;
        let reporter = tokio::spawn(report_health(generator.registry.clone(), health_status));
        let limits = config.limits;
        let inference = InferenceServer::new(InferenceService { generator: generator.clone() })
            .max_decoding_message_size(limits.body_max.0 as usize)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX);
        let (reflection, reflection_alpha) =
            service::grpc::reflection(proto::FILE_DESCRIPTOR_SET, HEALTH_SERVICE)?;
        let budget = SharedBudget::new(limits.budget());
        let tenants = generator.tenants.clone();
        let http_bodies =
            BodyLimits { bytes_max: limits.body_max.0, pace: limits.pace(), budget: budget.clone(), tenants };
        let grpc_bodies =
            BodyLimits { bytes_max: limits.body_max.0 + GRPC_PREFIX_BYTES, ..http_bodies.clone() };
        let grpc = Routes::from(axum::Router::new())
            .add_service(inference)
            .add_service(health_service)
            .add_service(reflection)
            .add_service(reflection_alpha)
            .into_axum_router()
            .layer(middleware::from_fn_with_state(grpc_bodies, limit_request_body));

        let unknown_fields =
            if limits.strict_requests { UnknownFields::Refuse } else { UnknownFields::Ignore };
        let app = AppState::new(generator, metrics, budget, fleet, unknown_fields, tracer.clone());
        // This listener has neither keys nor TLS.
        let health_routes = check_caller(http::health_routes(app.clone()), &own_names, true);
        let http_routes = http::routes(AppState { is_ready_detailed: access.is_none(), ..app })
            .layer(middleware::from_fn_with_state(http_bodies, limit_request_body));
        let mut all_routes = http_routes.merge(grpc);
        let on_socket = all_routes.clone().layer(middleware::from_fn_with_state(tracer.clone(), identify));
        // HTTP/1.1 for the chat of this user, whom the directory and the peer's user let in.
        let grpc_server = service::grpc::server().accept_http1(true).add_routes(Routes::from(on_socket));
        let on_socket = service::grpc::serve(grpc_server, socket, shutdown.requested());
        let is_host_checked = access.is_none() && tls.is_none();
        if let Some(access) = access {
            all_routes = all_routes.layer(middleware::from_fn_with_state(access, require_key));
        }
        let on_tcp = open_to_pages(all_routes, &own_names, is_host_checked, tracer);
        let on_tcp = serve_on(tcp, tls, on_tcp, limits.listener(), shutdown);
        let on_health = serve_on(health, None, health_routes, limits.health_listener(), shutdown);
        let drained = async {
            shutdown.requested().await;
            admission_control.begin_drain();
            tokio::time::sleep(limits.drain).await;
        };
        let served = tokio::select! {
            served = async { tokio::try_join!(on_socket, on_tcp, on_health) } => served.map(drop).map_err(RouterError::Serve),
            // Dropping the connections resets them, so a client sees a cut stream and no regular
            // end.
            () = drained => Ok(()),
            () = shutdown.forced() => Ok(()),
        };
        links.cancel();
        reporter.abort();
        // All end with their token.
        drop(tokio::join!(discovery, watched, admission));
        served
    }
}

/// The routes for web pages and other clients of the TCP address. A request that a check refuses
/// has an id and a line in the access log, too. Paths lose a slash at their end before they are
/// matched.
fn open_to_pages(
    routes: axum::Router,
    own_names: &OwnNames,
    is_host_checked: bool,
    tracer: Tracer,
) -> axum::Router {
    let routes = routes.layer(own_names.origins().cors_layer());
    let routes = check_caller(routes, own_names, is_host_checked)
        .layer(middleware::from_fn(shape_errors))
        .layer(middleware::from_fn(log_access))
        .layer(middleware::from_fn_with_state(tracer, identify));
    axum::Router::new().fallback_service(MapRequestLayer::new(trim_slash).layer(routes))
}

/// The routes behind the check of origins and perhaps that of hosts.
fn check_caller(routes: axum::Router, own_names: &OwnNames, is_host_checked: bool) -> axum::Router {
    let origins = own_names.origins().clone();
    let routes = routes.layer(middleware::from_fn_with_state(origins, check_origin));
    match is_host_checked {
        true => routes.layer(middleware::from_fn_with_state(own_names.clone(), check_host)),
        false => routes,
    }
}

async fn listen(address: Option<SocketAddr>) -> Result<Option<TcpListener>, RouterError> {
    let Some(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    listener.map(Some).map_err(|source| RouterError::Listen { address, source })
}

/// Cannot fail. The result is that of the other server.
async fn serve_on(
    listener: Option<TcpListener>,
    tls: Option<Arc<PublicTls>>,
    app: axum::Router,
    limits: ListenerLimits,
    shutdown: &Shutdown,
) -> Result<(), tonic::transport::Error> {
    if let Some(listener) = listener {
        listener::serve(listener, tls, app, limits, shutdown.token().clone()).await;
    }
    Ok(())
}

fn to_tokio_listener(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Reports SERVING while the registry has workers.
async fn report_health(registry: Arc<WorkerRegistry>, health: tonic_health::server::HealthReporter) {
    let mut changes = registry.subscribe();
    loop {
        let status = match registry.has_workers() {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        health.set_service_status(HEALTH_SERVICE, status).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}
