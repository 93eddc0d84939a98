// SPDX-License-Identifier: Apache-2.0

//! Determines the tenant of a request, for fairness and per-tenant limits.
//!
//! 1. The header `x-ballast-tenant` names the tenant. In gRPC it is metadata, and the field
//!    `tenant` is an alternative.
//! 2. Otherwise the caller's API key stands for a tenant.
//! 3. Otherwise the tenant is unnamed.
//!
//! The router authenticates no one. A gateway in front of it sets the header, and removes it from
//! requests of its users. The router keeps only a hash of a key, under a secret of this process,
//! because the tenant appears in metrics and goes to workers.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use crate::admission::Tenant;

pub(crate) const HEADER: &str = "x-ballast-tenant";

/// Tenant names are label values of metrics, so they are short.
const NAME_BYTES_MAX: usize = 64;
/// Prefix of an API key in `authorization`.
const BEARER: &str = "Bearer ";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`x-ballast-tenant` is not a tenant name: 1 to {NAME_BYTES_MAX} letters, digits and any of - _ . : @ are allowed"
)]
pub(crate) struct TenantNameError;

/// Determines tenants under a secret of this process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct TenantResolver {
    secret: RandomState,
}

impl TenantResolver {
    /// `name` is the value of the header or field, `authorization` the HTTP header.
    pub(crate) fn resolve(
        &self,
        name: Option<&[u8]>,
        authorization: Option<&[u8]>,
    ) -> Result<Tenant, TenantNameError> {
        if let Some(name) = name {
            let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(byte);
            let name = std::str::from_utf8(name).map_err(|_| TenantNameError)?;
            let is_valid = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.as_bytes().iter().all(is_plain);
            return if is_valid { Ok(Tenant::Named(name.into())) } else { Err(TenantNameError) };
        }
        let is_bearer = |scheme: &[u8]| scheme.eq_ignore_ascii_case(BEARER.as_bytes());
        let key = authorization.and_then(|value| value.split_at_checked(BEARER.len()));
        Ok(match key.filter(|(scheme, key)| is_bearer(scheme) && !key.is_empty()) {
            Some((_, key)) => Tenant::Named(format!("key-{:016x}", self.secret.hash_one(key)).into()),
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
        match tenants.resolve(name.map(str::as_bytes), authorization.map(str::as_bytes)) {
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
