// SPDX-License-Identifier: Apache-2.0

//! Which names a client of this machine may call the router by.
//!
//! A page of any site has a name that its owner can make resolve to 127.0.0.1. To the browser, the
//! router then belongs to that site: a GET of the page has no `origin`, and the page may read the
//! answer. It still sends the name as `host`. Requests with an API key or over TLS need no such
//! check: the page has neither the key nor a certificate for its name.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::origin::AllowedOrigins;
use crate::intake::ClientConnection;

/// Names that resolve to the machine itself (RFC 6761).
const LOCALHOST: &str = "localhost";

/// The names of this router. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct OwnNames {
    origins: AllowedOrigins,
    host_name: Arc<str>,
}

impl OwnNames {
    /// The hosts of allowed origins are names of this router, too: a proxy on this machine passes
    /// its own name on.
    pub(crate) fn new(origins: AllowedOrigins) -> Self {
        let host_name = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
        Self { origins, host_name: host_name.into() }
    }

    fn contains(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host().trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
        name.parse::<IpAddr>().is_ok()
            || name == LOCALHOST
            || name.strip_suffix(LOCALHOST).is_some_and(|prefix| prefix.ends_with('.'))
            || name == *self.host_name
            || self.origins.allows_host(&name)
    }
}

/// Middleware: refuses requests of this machine for another name.
pub(crate) async fn check_host(State(own): State<OwnNames>, request: Request, next: Next) -> Response {
    let client = request.extensions().get::<ClientConnection>();
    let is_local = client.is_some_and(|client| client.address.is_loopback());
    // HTTP/2 has the host in the request's target. A client of HTTP/1.0 may send none.
    let target = request.uri().authority().map(Authority::as_str);
    let header = request.headers().get(HOST).map(HeaderValue::to_str);
    let host = match (target, header) {
        (Some(host), _) | (None, Some(Ok(host))) => Some(host),
        (None, Some(Err(_))) => Some(""),
        (None, None) => None,
    };
    if is_local && host.is_some_and(|host| !own.contains(host)) {
        let message = "the header `host` is no name of this machine; the hosts of `access.origins` \
            (`--allow-origin`) are, and so is any IP address";
        return ApiError::invalid(None, message)
            .with_status(StatusCode::FORBIDDEN, "host_not_allowed")
            .into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_the_machine_s_name_and_listed_hosts_are_own_names() {
        let origins = AllowedOrigins::new(&["https://Chat.example:8443".to_owned()]).unwrap();
        let own = OwnNames { host_name: "dgx-1".into(), ..OwnNames::new(origins) };
        for name in [
            "127.0.0.1:8080",
            "[::1]:8080",
            "192.0.2.7",
            "localhost",
            "LocalHost.:8080",
            "a.localhost",
            "DGX-1:80",
            "chat.example",
        ] {
            assert!(own.contains(name), "{name}");
        }
        for foreign in [
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "dgx-1.evil.example",
            "x.chat.example",
            "",
            "a b",
        ] {
            assert!(!own.contains(foreign), "{foreign}");
        }
        let any = OwnNames::new(AllowedOrigins::new(&["*".to_owned()]).unwrap());
        assert!(any.contains("evil.example"));
    }
}
