// SPDX-License-Identifier: Apache-2.0

//! [`PoolingSetting`]: how a worker pools, whatever the model's file says.

use std::str::FromStr;

use models::Pooling;
use proto::v1 as public;
use serde::{Deserialize, Serialize};

/// What `pooling` of a model may be. Rank pooling needs a classifier, which only files that name it
/// have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolingSetting {
    /// The model makes no embeddings.
    None,
    Mean,
    Last,
}

#[derive(Debug, thiserror::Error)]
#[error("{found:?} is no pooling; known are none, mean and last")]
pub struct PoolingSettingError {
    found: String,
}

impl FromStr for PoolingSetting {
    type Err = PoolingSettingError;

    fn from_str(text: &str) -> Result<Self, PoolingSettingError> {
        match text {
            "none" => Ok(Self::None),
            "mean" => Ok(Self::Mean),
            "last" => Ok(Self::Last),
            _ => Err(PoolingSettingError { found: text.to_owned() }),
        }
    }
}

impl PoolingSetting {
    fn pooling(self) -> Option<Pooling> {
        match self {
            Self::None => None,
            Self::Mean => Some(Pooling::Mean),
            Self::Last => Some(Pooling::Last),
        }
    }
}

/// The pooling of a model whose file says `own`.
pub(crate) fn effective_pooling(setting: Option<PoolingSetting>, own: Option<Pooling>) -> Option<Pooling> {
    setting.map_or(own, PoolingSetting::pooling)
}

pub(crate) fn pooling_to_wire(pooling: Option<Pooling>) -> public::Pooling {
    match pooling {
        None => public::Pooling::Unspecified,
        Some(Pooling::Mean) => public::Pooling::Mean,
        Some(Pooling::Last) => public::Pooling::Last,
        Some(Pooling::Rank) => public::Pooling::Rank,
    }
}
