// SPDX-License-Identifier: Apache-2.0

//! [`UserId`]: a user in a configuration. Processes compare it with the user of a peer
//! (SO_PEERCRED).

use serde::{Deserialize, Serialize};

/// A user of this machine. Reads from a number, or from a name that is looked up at once: packages
/// create users by name, and their numbers differ between machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "NumberOrName", into = "u32")]
pub struct UserId(pub u32);

#[derive(Deserialize)]
#[serde(untagged, expecting = "write the name or the number of a user")]
enum NumberOrName {
    Number(u32),
    Name(String),
}

/// Why a name is not a user.
#[derive(Debug, thiserror::Error)]
enum UserError {
    #[error("this machine has no user {name:?}; create it, or write another name or a number")]
    Unknown { name: String },
    /// With its cause in the text: errors in files are one text.
    #[error("cannot look up the user {name:?}: {source}")]
    Lookup { name: String, source: nix::Error },
}

impl TryFrom<NumberOrName> for UserId {
    type Error = UserError;

    fn try_from(user: NumberOrName) -> Result<Self, UserError> {
        let name = match user {
            NumberOrName::Number(number) => return Ok(Self(number)),
            NumberOrName::Name(name) => name,
        };
        match nix::unistd::User::from_name(&name) {
            Ok(Some(user)) => Ok(Self(user.uid.as_raw())),
            Ok(None) => Err(UserError::Unknown { name }),
            Err(source) => Err(UserError::Lookup { name, source }),
        }
    }
}

impl From<UserId> for u32 {
    fn from(user: UserId) -> Self {
        user.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Access {
        users: BTreeSet<UserId>,
    }

    fn parsed(text: &str) -> Result<Access, String> {
        crate::config::parse(text, Path::new("a.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn users_are_names_or_numbers() {
        let expected = Access { users: BTreeSet::from([UserId(0), UserId(4242)]) };
        assert_eq!(parsed("users = [\"root\", 4242]"), Ok(expected));
        let written = toml::to_string(&parsed("users = [\"root\"]").unwrap()).unwrap();
        assert_eq!(written.trim(), "users = [0]");
    }

    #[test]
    fn a_name_without_a_user_is_an_error_that_names_both() {
        let unknown = parsed("users = [\"no-such-user\"]").unwrap_err();
        assert!(unknown.contains("users") && unknown.contains("no user \"no-such-user\""), "{unknown}");
        let wrong = parsed("users = [true]").unwrap_err();
        assert!(wrong.contains("name or the number"), "{wrong}");
    }
}
