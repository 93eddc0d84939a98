// SPDX-License-Identifier: Apache-2.0

//! Limits every request body in size, pace and bytes of the budget, for HTTP and gRPC alike.

use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;

use super::body_pace::{BodyPace, PaceLimits};
use super::byte_budget::{BudgetExceeded, BudgetKey, BudgetScope, ByteReservation, SharedBudget};
use super::client_address::ClientAddress;
use super::connection_table::TcpConnectionId;
use crate::access_control::KeyedRequest;
use crate::admission::Tenant;
use crate::tenant::{self, TenantResolver};

/// What limits the bodies of some routes. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes_max: u64,
    pub(crate) pace: PaceLimits,
    pub(crate) budget: SharedBudget,
    pub(crate) tenants: TenantResolver,
}

/// The TCP connection of a request. An extension of the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientConnection {
    pub(crate) id: TcpConnectionId,
    pub(crate) address: ClientAddress,
}

/// The bytes that a request holds. An extension of the request; they are released with the last
/// clone.
#[derive(Clone, Debug)]
pub(crate) struct RequestBytes(Arc<Mutex<ByteReservation>>);

impl RequestBytes {
    /// Releases everything above `bytes`.
    pub(crate) fn shrink_to(&self, bytes: usize) {
        self.lock(|reservation| reservation.shrink_to(bytes as u64));
    }

    fn grow(&self, bytes: usize) -> Result<(), BudgetExceeded> {
        self.lock(|reservation| reservation.grow(bytes as u64))
    }

    fn lock<T>(&self, change: impl FnOnce(&mut ByteReservation) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Why a body is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the request body has more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error(
        "the request body did not arrive in time: it must have at least {rate} bytes a second and no pause of \
         {} s",
        .grace.as_secs()
    )]
    TooSlow { rate: u64, grace: Duration },
    #[error(
        "requests of this connection or client hold too many bytes, the limit is {limit}; try again later"
    )]
    ClientBytes { limit: u64 },
    #[error("the router holds too many bytes of requests, the limit is {limit}; try again later")]
    RouterBytes { limit: u64 },
    #[error("the connection broke before the request body was complete")]
    Broken,
}

impl From<BudgetExceeded> for BodyError {
    fn from(exceeded: BudgetExceeded) -> Self {
        let limit = exceeded.limit;
        match exceeded.scope {
            BudgetScope::Connection | BudgetScope::Client => BodyError::ClientBytes { limit },
            BudgetScope::Total => BodyError::RouterBytes { limit },
        }
    }
}

impl From<&BodyError> for Status {
    fn from(error: &BodyError) -> Self {
        let message = error.to_string();
        match error {
            BodyError::TooLarge { .. } => Status::invalid_argument(message),
            BodyError::TooSlow { .. } => Status::deadline_exceeded(message),
            BodyError::ClientBytes { .. } => Status::resource_exhausted(message),
            BodyError::RouterBytes { .. } => Status::unavailable(message),
            BodyError::Broken => Status::cancelled(message),
        }
    }
}

/// The error of a body stream. tonic answers with the status that is its source.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
struct BodyFailure {
    error: BodyError,
    #[source]
    status: Status,
}

impl From<BodyError> for BodyFailure {
    fn from(error: BodyError) -> Self {
        Self { status: (&error).into(), error }
    }
}

/// The cause of an error of a limited body.
pub(crate) fn body_error(error: &(dyn Error + 'static)) -> BodyError {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(failure) = error.downcast_ref::<BodyFailure>() {
            return failure.error.clone();
        }
        cause = error.source();
    }
    BodyError::Broken
}

/// Middleware: limits the body, and gives the request its [`RequestBytes`].
pub(crate) async fn limit_request_body(
    State(limits): State<BodyLimits>,
    mut request: Request,
    next: Next,
) -> Response {
    let connection = request.extensions().get::<ClientConnection>().copied();
    let key = limits.budget_key(request.headers(), request.extensions().get(), connection);
    let reservation = limits.budget.open(key, connection.map(|connection| connection.id));
    let bytes = RequestBytes(Arc::new(Mutex::new(reservation)));
    request.extensions_mut().insert(bytes.clone());
    next.run(request.map(|body| Body::new(LimitedBody::new(body, limits, bytes)))).await
}

impl BodyLimits {
    fn budget_key(
        &self,
        headers: &HeaderMap,
        active: Option<&KeyedRequest>,
        connection: Option<ClientConnection>,
    ) -> BudgetKey {
        let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
        // The handler refuses a malformed tenant. Until then, its bytes count for the address.
        let (name, presented) = (header(tenant::HEADER), tenant::presented_key(headers));
        match (self.tenants.resolve(name, presented, active.map(KeyedRequest::key)), connection) {
            (Ok(Tenant::Named(name)), _) => BudgetKey::Tenant(name),
            (_, Some(connection)) => BudgetKey::Address(connection.address),
            (_, None) => BudgetKey::Local,
        }
    }
}

struct LimitedBody {
    inner: Body,
    limits: BodyLimits,
    bytes: RequestBytes,
    received: u64,
    start: Instant,
    pace: BodyPace,
    /// Set while the body waits for data.
    timer: Option<Pin<Box<Sleep>>>,
}

impl LimitedBody {
    fn new(inner: Body, limits: BodyLimits, bytes: RequestBytes) -> Self {
        let pace = BodyPace::new(limits.pace, Duration::ZERO);
        Self { inner, limits, bytes, received: 0, start: Instant::now(), pace, timer: None }
    }

    fn receive(&mut self, bytes: usize) -> Result<(), BodyError> {
        self.check_length(self.received + bytes as u64)?;
        self.bytes.grow(bytes)?;
        self.received += bytes as u64;
        self.pace.receive(bytes as u64, self.start.elapsed());
        Ok(())
    }

    fn check_length(&self, length: u64) -> Result<(), BodyError> {
        let limit = self.limits.bytes_max;
        if length > limit { Err(BodyError::TooLarge { limit }) } else { Ok(()) }
    }

    /// Ready when the body is too slow.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<BodyError> {
        let deadline = self.start + self.pace.deadline();
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        let PaceLimits { grace, rate_min } = self.limits.pace;
        timer.as_mut().poll(context).map(|()| BodyError::TooSlow { rate: rate_min, grace })
    }
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let failed = |error: BodyError| Poll::Ready(Some(Err(BodyFailure::from(error).into())));
        // A length that the client announces is refused before a byte of it is read.
        if let Err(error) = this.check_length(this.received + this.inner.size_hint().lower()) {
            return failed(error);
        }
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => match this.receive(frame.data_ref().map_or(0, Bytes::len)) {
                Ok(()) => Poll::Ready(Some(Ok(frame))),
                Err(error) => failed(error),
            },
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, "a request body broke");
                failed(BodyError::Broken)
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => match this.poll_deadline(context) {
                Poll::Ready(error) => failed(error),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
