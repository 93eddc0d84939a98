// SPDX-License-Identifier: Apache-2.0

//! Fields that affect how a request is scheduled: vLLM's `priority` and `cache_salt`, OpenAI's
//! `service_tier`, `prompt_cache_key` and `user`, and `deadline_ms` as in the gRPC API.

use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;
use crate::admission::PriorityClass;
use crate::params::RequestParams;

pub(crate) const SCHEDULING_FIELDS: [&str; 6] =
    ["priority", "service_tier", "cache_salt", "deadline_ms", "prompt_cache_key", "user"];

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SchedulingFields {
    priority: Option<i64>,
    service_tier: Option<ServiceTier>,
    cache_salt: Option<String>,
    deadline_ms: Option<i64>,
    /// Hints: what is not a string is none.
    prompt_cache_key: Option<Value>,
    user: Option<Value>,
}

/// OpenAI's service tiers. `scale` means reserved capacity, which this fleet does not sell: it is
/// the default class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ServiceTier {
    Auto,
    Default,
    Scale,
    Priority,
    Flex,
}

impl ServiceTier {
    /// The priority that the tier stands for. `auto` leaves the class to the field `priority`.
    fn priority(self) -> Option<i64> {
        match self {
            ServiceTier::Auto => None,
            ServiceTier::Default | ServiceTier::Scale => Some(0),
            ServiceTier::Priority => Some(-1),
            ServiceTier::Flex => Some(1),
        }
    }
}

impl SchedulingFields {
    /// Sets the scheduling parameters in `params`.
    pub(crate) fn apply_to(self, params: RequestParams) -> Result<RequestParams, ApiError> {
        let tier_priority = self.service_tier.and_then(ServiceTier::priority);
        if let (Some(of_tier), Some(priority)) = (tier_priority, self.priority)
            && of_tier.signum() != priority.signum()
        {
            let class = PriorityClass::of_priority(priority.signum() as i32).name();
            let message =
                format!("`service_tier` contradicts `priority`, which is {priority} and means class {class}");
            return Err(ApiError::invalid(Some("service_tier"), message));
        }
        let name = |field: Option<&Value>| Some(field?.as_str()?.into());
        Ok(RequestParams {
            session: name(self.prompt_cache_key.as_ref()).or_else(|| name(self.user.as_ref())),
            priority: self.priority.or(tier_priority),
            cache_salt: self.cache_salt,
            deadline_ms: self.deadline_ms,
            ..params
        })
    }
}
