//! Fields that say how a request stands among others: vLLM's `priority` and `cache_salt`, OpenAI's `service_tier`, and
//! `deadline_ms` as over gRPC.

use serde::Deserialize;

use super::error::ApiError;
use crate::admission::Class;
use crate::params::Params;

pub(crate) const STANDING_FIELDS: [&str; 4] = ["priority", "service_tier", "cache_salt", "deadline_ms"];

#[derive(Debug, Default, Deserialize)]
pub(crate) struct StandingFields {
    priority: Option<i64>,
    service_tier: Option<Tier>,
    cache_salt: Option<String>,
    deadline_ms: Option<i64>,
}

/// `scale` is a contract about capacity that nobody has with this fleet: ordinary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Tier {
    Auto,
    Default,
    Scale,
    Priority,
    Flex,
}

impl Tier {
    /// `auto` leaves the class to the priority.
    fn priority(self) -> Option<i64> {
        match self {
            Tier::Auto => None,
            Tier::Default | Tier::Scale => Some(0),
            Tier::Priority => Some(-1),
            Tier::Flex => Some(1),
        }
    }
}

impl StandingFields {
    pub(crate) fn add_to(self, params: Params) -> Result<Params, ApiError> {
        let of_tier = self.service_tier.and_then(Tier::priority);
        if let (Some(of_tier), Some(priority)) = (of_tier, self.priority)
            && of_tier.signum() != priority.signum()
        {
            let class = Class::of_priority(priority.signum() as i32).name();
            let message =
                format!("`service_tier` contradicts `priority`, which at {priority} asks for class {class}");
            return Err(ApiError::invalid(Some("service_tier"), message));
        }
        Ok(Params {
            priority: self.priority.or(of_tier),
            cache_salt: self.cache_salt,
            deadline_ms: self.deadline_ms,
            ..params
        })
    }
}
