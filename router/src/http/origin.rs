// SPDX-License-Identifier: Apache-2.0

//! Which web pages may call the API from a browser. A page of any site can send requests to a
//! server on the same machine, so the browser's `origin` header must name an allowed site.
//!
//! Programs that are not browsers send no `origin`. Pages of this machine are always allowed, and
//! the page at `/ui` of a router that was opened by its IP address. One opened by name must
//! be listed: with a name that resolves to this machine, a page of any site has this router's
//! origin.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN, RETRY_AFTER};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowOrigin, CorsLayer};
use traces::{TRACEPARENT, TRACESTATE};

use super::error::ApiError;
use crate::request_id::REQUEST_ID;
use crate::tenant;

/// How long a browser remembers the answer to a preflight request.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);
const LOOPBACK_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
const ANY: &str = "*";
const TENANT: HeaderName = HeaderName::from_static(tenant::HEADER);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`access.origins`: {0:?} is neither \"*\" nor an origin like \"https://example.org\" or \"http://host:8080\""
)]
pub struct OriginError(String);

/// The configured origins. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct AllowedOrigins(Arc<[String]>);

/// Splits scheme and host with port.
fn split(origin: &str) -> Option<(&str, &str)> {
    let (scheme, authority) = origin.split_once("://")?;
    let is_plain = !authority.is_empty() && !authority.contains(['/', '?', '#', '@', ' ']);
    (matches!(scheme, "http" | "https") && is_plain).then_some((scheme, authority))
}

impl AllowedOrigins {
    pub(crate) fn new(origins: &[String]) -> Result<Self, OriginError> {
        match origins.iter().find(|origin| *origin != ANY && split(origin).is_none()) {
            Some(wrong) => Err(OriginError(wrong.clone())),
            None => Ok(Self(origins.iter().map(|origin| origin.to_ascii_lowercase()).collect())),
        }
    }

    fn allows(&self, origin: &HeaderValue) -> bool {
        let Ok(origin) = origin.to_str().map(str::to_ascii_lowercase) else { return false };
        let host = || split(&origin)?.1.parse::<Uri>().ok()?.host().map(str::to_owned);
        self.0.iter().any(|allowed| allowed == ANY || *allowed == origin)
            || host().is_some_and(|host| LOOPBACK_HOSTS.contains(&host.as_str()))
    }

    /// Whether `name` is the host of a listed origin.
    pub(super) fn allows_host(&self, name: &str) -> bool {
        let host = |origin: &str| Some(split(origin)?.1.parse::<Authority>().ok()?.host() == name);
        self.0.iter().any(|allowed| allowed == ANY || host(allowed) == Some(true))
    }

    /// Whether the request comes from a page of this router that was opened by an IP address.
    fn is_own_address(request: &Request) -> bool {
        let text = |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
        let Some((_, origin)) = text(ORIGIN).and_then(split) else { return false };
        // HTTP/2 has the host in the request's target.
        let target = request.uri().authority().map(Authority::as_str);
        let is_own = target.or_else(|| text(HOST)).is_some_and(|host| host == origin);
        let host = origin.parse::<Authority>();
        let host = host.as_ref().map_or("", |authority| authority.host());
        is_own && host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    }

    /// Answers preflight requests, and lets pages of allowed origins read responses.
    pub(crate) fn cors_layer(&self) -> CorsLayer {
        let allowed = self.clone();
        CorsLayer::new()
            .allow_origin(AllowOrigin::predicate(move |origin, _| allowed.allows(origin)))
            .allow_methods([Method::GET, Method::POST])
            .allow_headers([AUTHORIZATION, CONTENT_TYPE, REQUEST_ID, TRACEPARENT, TRACESTATE, TENANT])
            .expose_headers([REQUEST_ID, RETRY_AFTER])
            .max_age(PREFLIGHT_AGE)
    }
}

/// Middleware: refuses requests of pages of other origins before anything else looks at them.
pub(crate) async fn check_origin(
    State(allowed): State<AllowedOrigins>,
    request: Request,
    next: Next,
) -> Response {
    match request.headers().get(ORIGIN) {
        Some(origin) if !allowed.allows(origin) && !AllowedOrigins::is_own_address(&request) => ApiError::invalid(
            None,
            "pages of this origin may not call the API; `access.origins` (`--allow-origin`) lists those that may",
        )
        .with_status(StatusCode::FORBIDDEN, "origin_not_allowed")
        .into_response(),
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(configured: &[&str], origin: &str) -> bool {
        let configured: Vec<String> = configured.iter().map(|&origin| origin.to_owned()).collect();
        AllowedOrigins::new(&configured).unwrap().allows(&HeaderValue::from_str(origin).unwrap())
    }

    #[test]
    fn pages_of_this_machine_and_of_listed_origins_are_allowed() {
        for own in ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8080", "HTTP://LOCALHOST"] {
            assert!(allows(&[], own), "{own}");
        }
        let foreign = [
            "https://evil.example",
            "null",
            "http://localhost.evil.example",
            "http://evil.example:80",
            "http://127.0.0.1.evil.example",
            "http://localhost@evil.example",
            "file://",
            "",
        ];
        for origin in foreign {
            assert!(!allows(&[], origin), "{origin}");
            assert!(!allows(&["https://chat.example"], origin), "{origin}");
            assert!(allows(&["*"], origin), "{origin}");
        }
        assert!(allows(&["https://Chat.example"], "https://chat.EXAMPLE"));
        assert!(!allows(&["https://chat.example"], "http://chat.example"), "another scheme");
        assert!(!allows(&["https://chat.example"], "https://chat.example:8443"), "another port");
    }

    #[test]
    fn the_router_s_own_page_is_allowed_by_address_and_not_by_name() {
        let is_own = |origin: &str, host: &str| {
            let request = Request::builder().uri("/v1/models").header(ORIGIN, origin).header(HOST, host);
            AllowedOrigins::is_own_address(&request.body(axum::body::Body::empty()).unwrap())
        };
        assert!(
            is_own("http://192.0.2.7:8000", "192.0.2.7:8000")
                && is_own("https://[2001:db8::7]", "[2001:db8::7]")
        );
        assert!(!is_own("http://rebound.example:8000", "rebound.example:8000"), "it may resolve to anything");
        assert!(!is_own("http://192.0.2.8:8000", "192.0.2.7:8000") && !is_own("null", "192.0.2.7"));
        let request =
            Request::builder().uri("https://192.0.2.7/v1/models").header(ORIGIN, "https://192.0.2.7");
        assert!(AllowedOrigins::is_own_address(&request.body(axum::body::Body::empty()).unwrap()), "HTTP/2");
    }

    #[test]
    fn wrong_origins_in_the_configuration_are_errors() {
        for wrong in ["chat.example", "https://chat.example/", "ftp://chat.example", "https://"] {
            assert_eq!(AllowedOrigins::new(&[wrong.to_owned()]).unwrap_err(), OriginError(wrong.to_owned()));
        }
    }
}
