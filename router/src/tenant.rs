//! Whose request it is, for fairness and bounds: the header `x-ballast-tenant` (over gRPC metadata, or the field `tenant`),
//! else the caller's API key, else nobody's.
//!
//! Nothing here is checked: this router has no keys. A gateway in front of it that authenticates its users sets the header,
//! and takes it away where users send it themselves. A key is known here by a hash alone, under a secret of this process: it
//! stands in metrics and goes to workers.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use crate::admission::Tenant;

pub(crate) const HEADER: &str = "x-ballast-tenant";

/// A label of metrics, not a document.
const NAME_BYTES_MAX: usize = 64;
const BEARER: &str = "Bearer ";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`x-ballast-tenant` names no tenant: 1 to {NAME_BYTES_MAX} letters, digits and any of - _ . : @ are allowed"
)]
pub(crate) struct BadTenant;

/// Knows tenants by number; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tenants {
    secret: RandomState,
}

impl Tenants {
    /// `name` as the caller gives it, `authorization` as HTTP has it.
    pub(crate) fn of(&self, name: Option<&[u8]>, authorization: Option<&[u8]>) -> Result<Tenant, BadTenant> {
        if let Some(name) = name {
            let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(byte);
            let name = std::str::from_utf8(name).map_err(|_| BadTenant)?;
            let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.as_bytes().iter().all(plain);
            return if fits { Ok(Tenant::Named(name.into())) } else { Err(BadTenant) };
        }
        let is_bearer = |scheme: &[u8]| scheme.eq_ignore_ascii_case(BEARER.as_bytes());
        let key = authorization.and_then(|value| value.split_at_checked(BEARER.len()));
        Ok(match key.filter(|(scheme, key)| is_bearer(scheme) && !key.is_empty()) {
            Some((_, key)) => Tenant::Named(format!("key-{:016x}", self.secret.hash_one(key)).into()),
            None => Tenant::Unnamed,
        })
    }

    /// What workers know a tenant by; 0 is nobody. Under the same secret, so that nobody can choose another's.
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

    fn named(tenants: &Tenants, name: Option<&str>, authorization: Option<&str>) -> String {
        match tenants.of(name.map(str::as_bytes), authorization.map(str::as_bytes)) {
            Ok(Tenant::Named(name)) => name.to_string(),
            Ok(Tenant::Unnamed) => "nobody".to_owned(),
            Err(BadTenant) => "bad".to_owned(),
        }
    }

    #[test]
    fn the_header_comes_before_the_key_and_a_key_shows_nowhere() {
        let tenants = Tenants::default();
        let key = "Bearer sk-secret";
        assert_eq!(named(&tenants, Some("team-a"), Some(key)), "team-a");
        assert_eq!(named(&tenants, None, None), "nobody");
        let shown = named(&tenants, None, Some(key));
        assert!(shown.starts_with("key-") && !shown.contains("secret"), "{shown}");
        assert_eq!(named(&tenants, None, Some("bearer sk-secret")), shown);
        assert_ne!(named(&tenants, None, Some("Bearer sk-other")), shown);
        for nobody in ["Basic dXNlcg==", "Bearer ", "Bearer", ""] {
            assert_eq!(named(&tenants, None, Some(nobody)), "nobody", "{nobody:?}");
        }
        assert_ne!(named(&Tenants::default(), None, Some(key)), shown, "another process, another secret");
    }

    #[test]
    fn names_are_short_and_plain() {
        let tenants = Tenants::default();
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for bad in ["", "a b", "a\"b", "ü", &long] {
            assert_eq!(named(&tenants, Some(bad), None), "bad", "{bad:?}");
        }
        assert_eq!(named(&tenants, Some(&long[1..]), None), long[1..]);
    }

    #[test]
    fn nobody_has_number_0() {
        let tenants = Tenants::default();
        let number = |name: &str| tenants.number(&Tenant::Named(name.into()));
        assert_eq!(tenants.number(&Tenant::Unnamed), 0);
        assert!(number("a") != 0 && number("a") != number("b"));
        assert_eq!(number("a"), number("a"));
    }
}
