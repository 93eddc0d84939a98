// SPDX-License-Identifier: Apache-2.0

//! How many workers the router uses for each model.

use std::collections::HashMap;

use proto::v1::ListModelsReply;

/// The workers that the router uses, by model. While a model is swapped, and for a moment after it,
/// the router lists the model once for each file: the file with most workers counts.
pub(crate) fn served_workers(reply: ListModelsReply) -> HashMap<String, u32> {
    let mut served = HashMap::new();
    for model in reply.models {
        let workers = served.entry(model.name).or_default();
        *workers = model.workers.max(*workers);
    }
    served
}
