// SPDX-License-Identifier: Apache-2.0

//! Who may call the API over TCP, and how much: API keys with their limits. Plain values, without
//! I/O or clock; [`crate::access_control`] runs them.
//!
//! Once there is a key file, a request without a valid key is refused, whatever its route
//! ([`crate::access_control::require_key`] names the exceptions). `router.sock` needs no key: only
//! processes of the same user can connect to it.

mod key_file;
mod policy;

pub(crate) use key_file::{ApiKey, read_keys};
pub use key_file::{KeyFileError, check_key_text};
pub(crate) use policy::{AccessPolicy, AccessRefusal, AccessTime};

use std::sync::Arc;

use crate::model::ServedModel;

/// The models that a caller may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModelAccess(Option<Arc<[String]>>);

impl ModelAccess {
    pub(crate) fn only(models: Vec<String>) -> Self {
        Self(Some(models.into()))
    }

    /// The names under which the caller may ask for the model. A key for a model is good for its
    /// aliases, a key for an alias is good for that alone.
    pub(crate) fn names_of<'a>(&'a self, model: &'a ServedModel) -> impl Iterator<Item = &'a str> {
        let is_whole = self.allows(model.name());
        model.names().filter(move |name| is_whole || self.allows(name))
    }

    pub(crate) fn allows(&self, model: &str) -> bool {
        self.0.as_ref().is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }
}
