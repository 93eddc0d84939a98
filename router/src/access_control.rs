// SPDX-License-Identifier: Apache-2.0

//! Runs the [`AccessPolicy`]: the middleware that admits requests, and the watch of the key file.
//!
//! A small lock guards the policy. It is held for a hash and a few comparisons, never across an
//! await.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::time::Instant;
use tonic::Status;

use crate::access::{AccessPolicy, AccessRefusal, AccessTime, ApiKey, ModelAccess, read_keys};
use crate::error::RouterError;
use crate::http::{ApiError, is_grpc, is_page_file};
use crate::metrics;
use crate::tenant;

/// What needs no key, so that probes work. The files of the page at `/ui` need none either: they
/// hold nothing secret, and the user types the key there. Metrics need one; `health-listen` serves
/// them without.
const OPEN_ROUTES: [&str; 4] =
    ["/health", "/ready", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"];
/// How soon a changed key file is used.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct AccessController {
    start: Instant,
    path: PathBuf,
    policy: Mutex<AccessPolicy>,
}

/// A request that runs under its API key. An extension of the request. The key counts it as running
/// until the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct KeyedRequest(Arc<KeyHold>);

#[derive(Debug)]
struct KeyHold {
    controller: Arc<AccessController>,
    key: Arc<ApiKey>,
}

impl Drop for KeyHold {
    fn drop(&mut self) {
        self.controller.lock().end_request(&self.key);
    }
}

impl KeyedRequest {
    pub(crate) fn key(&self) -> &ApiKey {
        &self.0.key
    }

    /// The models that the caller may use: all without a key file.
    pub(crate) fn models(active: Option<&Self>) -> ModelAccess {
        active.map_or_else(ModelAccess::default, |active| active.key().models.clone())
    }

    pub(crate) fn record_prompt(&self, tokens: usize) {
        metrics::record_key_prompt_tokens(&self.key().name, tokens);
        self.record_tokens(tokens);
    }

    pub(crate) fn record_output(&self, tokens: usize) {
        metrics::record_key_output_tokens(&self.key().name, tokens);
        self.record_tokens(tokens);
    }

    fn record_tokens(&self, tokens: usize) {
        let controller = &self.0.controller;
        controller.lock().record_tokens(self.key(), tokens as u64, controller.now());
    }
}

/// When a file was last changed: a new file, or new content.
type FileVersion = (u64, u64, i64, i64);

/// `None` if the file is missing.
fn version(path: &Path) -> Option<FileVersion> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
}

/// Reads the key file again whenever it has changed, until the router is gone. `read` is what it
/// was before it was read first.
fn reload_on_change(watched: &Weak<AccessController>, mut read: Option<FileVersion>) {
    loop {
        std::thread::sleep(RELOAD_INTERVAL);
        let Some(access) = watched.upgrade() else { return };
        let found = version(&access.path);
        if found != read {
            read = found;
            access.reload();
        }
    }
}

impl AccessController {
    /// Reads the key file, and starts the thread that looks for a new one.
    pub(crate) fn start(path: PathBuf) -> Result<Arc<Self>, RouterError> {
        // Found before the file is read: what changes in between is read again.
        let found = version(&path);
        let mut policy = AccessPolicy::default();
        policy.replace_keys(read_keys(&path)?);
        let access = Arc::new(Self { start: Instant::now(), path, policy: policy.into() });
        let watched = Arc::downgrade(&access);
        // A file system that does not answer stops this thread and nothing else.
        let thread = std::thread::Builder::new().name("key-file".to_owned());
        thread.spawn(move || reload_on_change(&watched, found)).map_err(RouterError::KeyFileThread)?;
        Ok(access)
    }

    /// A file that is not valid changes nothing and is reported.
    fn reload(&self) {
        match read_keys(&self.path) {
            Ok(keys) => {
                tracing::info!(keys = keys.len(), "read the key file");
                self.lock().replace_keys(keys);
            }
            Err(error) => {
                let error = service::exit::one_line(&error);
                tracing::error!(error, "the keys stay as they were");
            }
        }
    }

    fn begin_request(self: &Arc<Self>, presented: Option<&[u8]>) -> Result<KeyedRequest, AccessRefusal> {
        let key = self.lock().begin_request(presented, self.now())?;
        Ok(KeyedRequest(Arc::new(KeyHold { controller: self.clone(), key })))
    }

    fn now(&self) -> AccessTime {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        AccessTime { uptime: self.start.elapsed(), unix }
    }

    fn lock(&self) -> MutexGuard<'_, AccessPolicy> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Middleware around all routes, also unknown ones: nothing of a body is read without a valid key.
pub(crate) async fn require_key(
    State(access): State<Arc<AccessController>>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if OPEN_ROUTES.contains(&path) || is_page_file(path) {
        return next.run(request).await;
    }
    match access.begin_request(tenant::presented_key(request.headers())) {
        Ok(active) => {
            request.extensions_mut().insert(active);
            next.run(request).await
        }
        Err(refusal) => {
            metrics::record_access_refusal(refusal.reason());
            match is_grpc(request.headers()) {
                true => Status::from(refusal).into_http::<Body>(),
                false => ApiError::from(refusal).into_response(),
            }
        }
    }
}

impl From<AccessRefusal> for Status {
    fn from(refusal: AccessRefusal) -> Self {
        let message = refusal.to_string();
        let mut status = match refusal {
            AccessRefusal::NoKey | AccessRefusal::UnknownKey => Status::unauthenticated(message),
            AccessRefusal::TooManyRequests { .. }
            | AccessRefusal::TooManyConcurrent { .. }
            | AccessRefusal::NoTokensLeft { .. } => Status::resource_exhausted(message),
        };
        if let Some(retry_after) = refusal.retry_after() {
            status.metadata_mut().insert("retry-after", retry_after.as_secs().into());
        }
        status
    }
}
