// SPDX-License-Identifier: Apache-2.0

//! Names of weights at the weight-server. Several models of a fleet share one copy of the same
//! file, so a copy has a name of its own: that of its first model, unless that name is in use.
//!
//! ```text
//! model a on 0        copy "a" on 0  <--  a, b
//! model c on 1        copy "c" on 1  <--  c, b      both are of one file
//! model b on 0, 1
//! ```
//!
//! A successor of a supervisor gives a model the name that its predecessor chose, because the
//! resident weights and the running workers have it.

use crate::model_record::RecordedModel;
use crate::spec::{CopySpec, ModelSpec};

/// The name for the weights of `model` on one of its devices: that of the copy there that a model
/// among `others` has, else the name of another copy of `model`, else one that is not `taken`.
pub fn name_for<'a>(
    model: &ModelSpec,
    device: &str,
    mut others: impl Iterator<Item = &'a ModelSpec>,
    taken: impl Iterator<Item = &'a str>,
) -> String {
    let named = |weights: &&str| !weights.is_empty();
    let shared = |other: &'a ModelSpec| other.weights_on(device).filter(named);
    if let Some(name) = others.find_map(|other| shared(other).filter(|_| other.has_same_weights(model))) {
        return name.to_owned();
    }
    if let Some(own) = model.copies.iter().map(|copy| copy.weights.as_str()).find(named) {
        return own.to_owned();
    }
    let taken: Vec<&str> = taken.collect();
    let numbered = (2..).map(|number: u64| format!("{}#{number}", model.name));
    let mut names = std::iter::once(model.name.clone()).chain(numbered);
    names.find(|name| !taken.contains(&name.as_str())).expect("invariant: fewer models than numbers")
}

/// Names the weights of all models of a fleet. `recorded` are the models of the predecessor.
pub fn name_all(models: &mut [ModelSpec], recorded: &[RecordedModel]) {
    for model in models.iter_mut() {
        // The copies on devices that the model keeps stay where they are.
        let is_it = |known: &&RecordedModel| {
            known.name == model.name && known.path == model.path && known.pack == model.pack
        };
        let known = recorded.iter().find(is_it);
        for copy in &mut model.copies {
            let weights = known.and_then(|known| known.weights_on(&copy.device));
            copy.weights = weights.unwrap_or_default().to_owned();
        }
    }
    for index in 0..models.len() {
        for copy in 0..models[index].copies.len() {
            let model = &models[index];
            let CopySpec { device, weights, .. } = &model.copies[copy];
            if weights.is_empty() {
                let others = models.iter().enumerate().filter(|(other, _)| *other != index);
                let taken = models.iter().flat_map(ModelSpec::weights);
                let name = name_for(model, device, others.map(|(_, other)| other), taken);
                models[index].copies[copy].weights = name;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::CopyMemory;

    fn copy(device: &str, weights: &str) -> CopySpec {
        let worker_config = toml::Table::new();
        let (device, weights) = (device.to_owned(), weights.to_owned());
        CopySpec { device, weights, worker_config, memory: CopyMemory::default() }
    }

    fn model(name: &str, files: &str, pack: bool) -> ModelSpec {
        ModelSpec {
            name: name.to_owned(),
            path: format!("/{files}.gguf").into(),
            workers: 1,
            copies: vec![copy("host", "")],
            pack,
            files: files.to_owned(),
            configured_path: std::path::PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: toml::Table::new(),
        }
    }

    fn names(models: &[ModelSpec]) -> Vec<&str> {
        models.iter().flat_map(ModelSpec::weights).collect()
    }

    #[test]
    fn models_of_one_file_share_a_name_unless_layout_or_device_differ() {
        let mut models = [model("a", "f", true), model("b", "f", true), model("c", "f", false)];
        name_all(&mut models, &[]);
        assert_eq!(names(&models), ["a", "a", "c"]);
        let mut unknown = [model("a", "", true), model("b", "", true)];
        name_all(&mut unknown, &[]);
        assert_eq!(names(&unknown), ["a", "b"]);
    }

    fn on(name: &str, devices: &[&str]) -> ModelSpec {
        ModelSpec {
            copies: devices.iter().map(|device| copy(device, "")).collect(),
            ..model(name, "f", true)
        }
    }

    #[test]
    fn models_share_the_copies_on_common_devices_in_any_order() {
        let mut models = [on("a", &["0", "1"]), on("b", &["1", "2"]), on("c", &["3"])];
        name_all(&mut models, &[]);
        assert_eq!(names(&models), ["a", "a", "a", "a", "c"]);
        let mut models = [on("a", &["0"]), on("c", &["1"]), on("b", &["0", "1", "2"])];
        name_all(&mut models, &[]);
        assert_eq!(names(&models), ["a", "c", "a", "c", "a"]);
    }

    #[test]
    fn one_more_device_keeps_the_copies_that_are_there() {
        let named = ModelSpec { copies: vec![copy("0", "a#2")], ..on("a", &[]) };
        let mut more = [on("a", &["1", "0"])];
        name_all(&mut more, &[RecordedModel::of(&named, false)]);
        assert_eq!(names(&more), ["a#2", "a#2"]);
        let mut apart = [on("a", &["0"]), on("c", &["1"])];
        name_all(&mut apart, &[]);
        let recorded = apart.map(|model| RecordedModel::of(&model, false));
        let mut more = [on("a", &["0", "1"]), on("c", &["1"])];
        name_all(&mut more, &recorded);
        assert_eq!(names(&more), ["a", "c", "c"]);
    }

    #[test]
    fn a_successor_keeps_the_names_and_gives_no_name_twice() {
        let mut before = [model("a", "f", true), model("b", "f", true)];
        name_all(&mut before, &[]);
        let recorded = before.map(|model| RecordedModel::of(&model, false));
        // The first model has another file now, and the copy keeps the name for the second one.
        let mut after = [model("a", "g", true), model("b", "f", true), model("c", "g", true)];
        name_all(&mut after, &recorded);
        assert_eq!(names(&after), ["a#2", "a", "a#2"]);
    }

    #[test]
    fn a_record_without_names_of_weights_means_those_of_the_models() {
        let known = RecordedModel::of(&model("a", "f", true), false);
        let mut models = [model("a", "f", true), model("b", "f", true)];
        name_all(&mut models, &[known]);
        assert_eq!(names(&models), ["a", "a"]);
    }
}
