// SPDX-License-Identifier: Apache-2.0

//! Determines the tenant of a request, for fairness and per-tenant limits.
//!
//! With a key file ([`crate::access`]), the name of the API key is the tenant. A key that is marked
//! as a gateway names the tenant itself, as below. Without a key file:
//!
//! 1. The header `x-ballast-tenant` names the tenant. In gRPC it is metadata, and the field
//!    `tenant` is an alternative.
//! 2. Otherwise the caller's API key stands for a tenant.
//! 3. Otherwise the tenant is unnamed.
//!
//! The router then authenticates no one. A gateway in front of it sets the header, and removes it
//! from requests of its users. The router keeps only a hash of a key, under a secret of this
//! process, because the tenant appears in metrics and goes to workers.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use axum::http::{HeaderMap, HeaderValue};

use crate::access::ApiKey;
use crate::admission::Tenant;

pub(crate) const HEADER: &str = "x-ballast-tenant";

/// Tenant names are label values of metrics, so they are short.
const NAME_BYTES_MAX: usize = 64;
/// Anthropic's clients send the key alone in this header.
const ANTHROPIC_KEY: &str = "x-api-key";
/// Prefix of an API key in `authorization`.
const BEARER: &str = "Bearer ";

/// What an error says about an invalid name.
pub(crate) const NAME_RULE: &str = "1 to 64 letters, digits and any of - _ . : @ are allowed";
const _: () = assert!(NAME_BYTES_MAX == 64);

pub(crate) fn is_name(name: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(byte);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.iter().all(is_plain)
}

/// The API key in the value of the header `authorization`.
pub(crate) fn bearer_key(authorization: Option<&[u8]>) -> Option<&[u8]> {
    let (scheme, key) = authorization?.split_at_checked(BEARER.len())?;
    (scheme.eq_ignore_ascii_case(BEARER.as_bytes()) && !key.is_empty()).then_some(key)
}

/// The API key of a request: in `authorization`, or in Anthropic's header.
pub(crate) fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    let value = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    bearer_key(value("authorization")).or_else(|| value(ANTHROPIC_KEY).filter(|key| !key.is_empty()))
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`x-ballast-tenant` is not a tenant name: {NAME_RULE}")]
pub(crate) struct TenantNameError;

/// Determines tenants under a secret of this process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct TenantResolver {
    secret: RandomState,
}

impl TenantResolver {
    /// `name` is the value of the header or field, `presented` the API key that the request has.
    /// `key` is the key of the key file that it was admitted with.
    pub(crate) fn resolve(
        &self,
        name: Option<&[u8]>,
        presented: Option<&[u8]>,
        key: Option<&ApiKey>,
    ) -> Result<Tenant, TenantNameError> {
        if let Some(name) = name.filter(|_| key.is_none_or(|key| key.is_gateway)) {
            let name = std::str::from_utf8(name).ok().filter(|name| is_name(name.as_bytes()));
            return name.map(|name| Tenant::Named(name.into())).ok_or(TenantNameError);
        }
        if let Some(key) = key {
            return Ok(Tenant::Named(key.name.clone()));
        }
        Ok(match presented {
            Some(key) => Tenant::Named(format!("key-{:016x}", self.secret.hash_one(key)).into()),
            None => Tenant::Unnamed,
        })
    }

    /// The number that workers identify the tenant by. 0 is the unnamed tenant. The secret keeps
    /// clients from choosing a name with another tenant's number.
    pub(crate) fn number(&self, tenant: &Tenant) -> u64 {
        match tenant {
            Tenant::Unnamed => 0,
            Tenant::Named(name) => self.secret.hash_one(&**name).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(tenants: &TenantResolver, name: Option<&str>, authorization: Option<&str>) -> String {
        let presented = bearer_key(authorization.map(str::as_bytes));
        match tenants.resolve(name.map(str::as_bytes), presented, None) {
            Ok(Tenant::Named(name)) => name.to_string(),
            Ok(Tenant::Unnamed) => "unnamed".to_owned(),
            Err(TenantNameError) => "invalid".to_owned(),
        }
    }

    #[test]
    fn the_header_overrides_the_key_and_the_key_is_not_shown() {
        let tenants = TenantResolver::default();
        let key = "Bearer sk-secret";
        assert_eq!(resolve(&tenants, Some("team-a"), Some(key)), "team-a");
        assert_eq!(resolve(&tenants, None, None), "unnamed");
        let shown = resolve(&tenants, None, Some(key));
        assert!(shown.starts_with("key-") && !shown.contains("secret"), "{shown}");
        assert_eq!(resolve(&tenants, None, Some("bearer sk-secret")), shown);
        assert_ne!(resolve(&tenants, None, Some("Bearer sk-other")), shown);
        for unnamed in ["Basic dXNlcg==", "Bearer ", "Bearer", ""] {
            assert_eq!(resolve(&tenants, None, Some(unnamed)), "unnamed", "{unnamed:?}");
        }
        assert_ne!(
            resolve(&TenantResolver::default(), None, Some(key)),
            shown,
            "another process has another secret"
        );
    }

    #[test]
    fn tenant_names_are_short_and_plain() {
        let tenants = TenantResolver::default();
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for name in ["", "a b", "a\"b", "ü", &long] {
            assert_eq!(resolve(&tenants, Some(name), None), "invalid", "{name:?}");
        }
        assert_eq!(resolve(&tenants, Some(&long[1..]), None), long[1..]);
    }

    #[test]
    fn the_unnamed_tenant_has_number_0() {
        let tenants = TenantResolver::default();
        let number = |name: &str| tenants.number(&Tenant::Named(name.into()));
        assert_eq!(tenants.number(&Tenant::Unnamed), 0);
        assert!(number("a") != 0 && number("a") != number("b"));
        assert_eq!(number("a"), number("a"));
    }
}
