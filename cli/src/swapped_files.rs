// SPDX-License-Identifier: Apache-2.0

//! Models that were swapped: the running fleet has another file than its configuration names.

use service::RuntimeDir;
use supervisor::recorded_models;

use crate::fleet_config::FleetConfig;

/// The configuration with the files that `ballast swap` gave to a fleet of which processes still
/// run. A path that the configuration did not name at the swap is left as it is.
pub(crate) fn with_swapped_files(config: &FleetConfig, directory: &RuntimeDir) -> FleetConfig {
    let mut config = config.clone();
    // Without a living process nothing is left of the swap.
    if directory.living_children().map_or(true, |living| living.is_empty()) {
        return config;
    }
    let recorded = recorded_models(directory);
    for model in &mut config.models {
        let Ok(path) = std::path::absolute(&model.path) else { continue };
        let is_swapped = recorded
            .iter()
            .find(|known| known.name == model.name && known.configured_path == path && known.path != path);
        if let Some(swapped) = is_swapped {
            model.path = swapped.path.clone();
            model.configured_path = Some(path);
        }
    }
    config
}
