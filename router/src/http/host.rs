// SPDX-License-Identifier: Apache-2.0

//! Which names a client of this machine may call the router by.
//!
//! A page of any site has a name that its owner can make resolve to 127.0.0.1, or to another
//! address of this machine. To the browser, the router then belongs to that site: a GET of the page
//! has no `origin`, and the page may read the answer. It still sends the name as `host`. Requests
//! with an API key or over TLS need no such check: the page has neither the key nor a certificate
//! for its name.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tonic::Status;

use super::error::ApiError;
use super::is_grpc;
use super::origin::AllowedOrigins;
use crate::intake::ClientAddress;
use crate::metrics;

/// Names that resolve to the machine itself: RFC 6761 for this one and all names below it, the
/// usual `/etc/hosts` for the others.
const LOCALHOST: &str = "localhost";
const LOOPBACK_NAMES: [&str; 5] =
    ["localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];
/// The code of the error, and the label of the counter of refusals.
const HOST_NOT_ALLOWED: &str = "host_not_allowed";
const REFUSAL: &str = "the header `host` is no name of this machine. Use an IP address or `localhost`, or \
    list the name in `access.hosts`. A proxy may send a name of its own: nginx sends the upstream's";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`access.hosts`: {0:?} is no host name like \"llm.example.org\"; write it in lower case, without \
     scheme, port or path"
)]
pub struct HostError(String);

/// The machine on which a client runs. An extension of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientMachine {
    This,
    Other,
}

impl ClientMachine {
    /// `local` is the router's end of the connection. A page can name any address of this machine,
    /// and the kernel then gives the browser's end the same one.
    pub(crate) fn of(client: IpAddr, local: IpAddr) -> Self {
        let is_same = client.to_canonical() == local.to_canonical();
        match is_same || ClientAddress::from(client).is_loopback() {
            true => Self::This,
            false => Self::Other,
        }
    }
}

/// The names of this router. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct OwnNames {
    origins: AllowedOrigins,
    hosts: Arc<[String]>,
    host_name: Arc<str>,
    /// The name that the machine has in multicast DNS.
    local_name: Arc<str>,
}

fn is_host_name(name: &str) -> bool {
    let is_label = |label: &str| {
        // Upstreams of proxies have underscores.
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
        !label.is_empty() && label.bytes().all(is_plain)
    };
    name.split('.').all(is_label)
}

impl OwnNames {
    /// `hosts` are further names: a proxy on this machine passes its own name on. For the same
    /// reason, the hosts of allowed origins are names of this router.
    pub(crate) fn new(origins: AllowedOrigins, hosts: &[String]) -> Result<Self, HostError> {
        if let Some(wrong) = hosts.iter().find(|name| !is_host_name(name)) {
            return Err(HostError(wrong.clone()));
        }
        let host_name = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
        Ok(Self::of_machine(origins, hosts, &host_name))
    }

    fn of_machine(origins: AllowedOrigins, hosts: &[String], host_name: &str) -> Self {
        let label = host_name.split('.').next().unwrap_or(host_name);
        let local_name = format!("{label}.local").into();
        Self { origins, hosts: hosts.into(), host_name: host_name.into(), local_name }
    }

    pub(crate) fn origins(&self) -> &AllowedOrigins {
        &self.origins
    }

    fn contains(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host().trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
        name.parse::<IpAddr>().is_ok()
            || name == LOCALHOST
            || name.strip_suffix(LOCALHOST).is_some_and(|prefix| prefix.ends_with('.'))
            || LOOPBACK_NAMES.contains(&name.as_str())
            || name == *self.host_name
            || name == *self.local_name
            || self.hosts.contains(&name)
            || self.origins.allows_host(&name)
    }
}

/// Middleware: refuses requests of this machine for another name.
pub(crate) async fn check_host(State(own): State<OwnNames>, request: Request, next: Next) -> Response {
    let is_local = request.extensions().get() == Some(&ClientMachine::This);
    // HTTP/2 has the host in the request's target. A client of HTTP/1.0 may send none.
    let target = request.uri().authority().map(Authority::as_str);
    let header = request.headers().get(HOST).map(HeaderValue::to_str);
    let host = match (target, header) {
        (Some(host), _) | (None, Some(Ok(host))) => Some(host),
        (None, Some(Err(_))) => Some(""),
        (None, None) => None,
    };
    if !is_local || host.is_none_or(|host| own.contains(host)) {
        return next.run(request).await;
    }
    metrics::record_access_refusal(HOST_NOT_ALLOWED);
    match is_grpc(request.headers()) {
        true => Status::permission_denied(REFUSAL).into_http::<Body>(),
        false => ApiError::invalid(None, REFUSAL)
            .with_status(StatusCode::FORBIDDEN, HOST_NOT_ALLOWED)
            .into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(origins: &[&str]) -> AllowedOrigins {
        let origins: Vec<String> = origins.iter().map(|&origin| origin.to_owned()).collect();
        AllowedOrigins::new(&origins).unwrap()
    }

    #[test]
    fn addresses_localhost_the_machine_s_name_and_listed_hosts_are_own_names() {
        let listed = ["ballast_backend".to_owned(), "llm.example".to_owned()];
        let own = OwnNames::of_machine(origins(&["https://Chat.example:8443"]), &listed, "dgx-1");
        for name in [
            "127.0.0.1:8080",
            "[::1]:8080",
            "192.0.2.7",
            "localhost",
            "LocalHost.:8080",
            "a.localhost",
            "localhost.localdomain:8080",
            "localhost4",
            "localhost6",
            "ip6-localhost",
            "ip6-loopback",
            "DGX-1:80",
            "dgx-1.local:8080",
            "chat.example",
            "LLM.example:8080",
            "ballast_backend",
        ] {
            assert!(own.contains(name), "{name}");
        }
        for foreign in [
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "localhost.localdomain.evil.example",
            "notlocalhost",
            "dgx-1.evil.example",
            "dgx-1.local.evil.example",
            "other.local",
            "x.chat.example",
            "x.llm.example",
            "",
            "a b",
        ] {
            assert!(!own.contains(foreign), "{foreign}");
        }
        let qualified = OwnNames::of_machine(origins(&[]), &[], "dgx-1.corp.example");
        assert!(qualified.contains("dgx-1.corp.example") && qualified.contains("dgx-1.local"));
        assert!(OwnNames::of_machine(origins(&["*"]), &[], "dgx-1").contains("evil.example"));
    }

    #[test]
    fn a_client_with_an_address_of_this_machine_is_local() {
        let machine =
            |client: &str, local: &str| ClientMachine::of(client.parse().unwrap(), local.parse().unwrap());
        for (client, local) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.0.1", "127.0.0.2"),
            ("::1", "::1"),
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8::7", "2001:db8::7"),
        ] {
            assert_eq!(machine(client, local), ClientMachine::This, "{client} at {local}");
        }
        // A neighbour of the same /64 is another machine.
        for (client, local) in [("192.0.2.8", "192.0.2.7"), ("2001:db8::8", "2001:db8::7")] {
            assert_eq!(machine(client, local), ClientMachine::Other, "{client} at {local}");
        }
    }

    #[test]
    fn wrong_hosts_in_the_configuration_are_errors() {
        let wrong = ["", "*", "LLM.example", "llm.example:80", "http://llm.example", "llm.example/", "a..b"];
        for wrong in wrong.map(str::to_owned) {
            let error = OwnNames::new(origins(&[]), std::slice::from_ref(&wrong)).unwrap_err();
            assert_eq!(error, HostError(wrong));
        }
    }
}
