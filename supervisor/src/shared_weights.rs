// SPDX-License-Identifier: Apache-2.0

//! Names of weights at the weight-server. Several models of a fleet share one copy of the same
//! file, so a copy has a name of its own: that of its first model, unless that name is in use.
//!
//! A successor of a supervisor gives a model the name that its predecessor chose, because the
//! resident weights and the running workers have it.

use crate::model_record::RecordedModel;
use crate::spec::ModelSpec;

/// The name for the weights of `model`: that of a model among `others` with the same copy, else one
/// that is not `taken`.
pub fn name_for<'a>(
    model: &ModelSpec,
    mut others: impl Iterator<Item = &'a ModelSpec>,
    taken: impl Iterator<Item = &'a str>,
) -> String {
    if let Some(shared) = others.find(|other| !other.weights.is_empty() && other.has_same_copy(model)) {
        return shared.weights.clone();
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
            let keeps_copy = || known.devices().any(|device| model.copy_on(device).is_some());
            known.name == model.name && known.path == model.path && known.pack == model.pack && keeps_copy()
        };
        let known = recorded.iter().find(is_it);
        model.weights = known.map_or_else(String::new, |known| match known.weights.as_str() {
            // A record of version 0.1.
            "" => known.name.clone(),
            weights => weights.to_owned(),
        });
    }
    for index in 0..models.len() {
        let model = &models[index];
        if model.weights.is_empty() {
            let taken = models.iter().map(|other| other.weights.as_str());
            models[index].weights = name_for(model, models.iter(), taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::CopySpec;

    fn model(name: &str, files: &str, pack: bool) -> ModelSpec {
        ModelSpec {
            name: name.to_owned(),
            path: format!("/{files}.gguf").into(),
            workers: 1,
            copies: vec![CopySpec { device: "host".to_owned(), worker_config: toml::Table::new() }],
            pack,
            files: files.to_owned(),
            weights: String::new(),
            configured_path: std::path::PathBuf::new(),
            settings: toml::Table::new(),
        }
    }

    fn names(models: &[ModelSpec]) -> Vec<&str> {
        models.iter().map(|model| model.weights.as_str()).collect()
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

    #[test]
    fn models_share_a_name_if_they_have_a_copy_in_common() {
        let on = |name: &str, devices: &[&str]| {
            let copy =
                |device: &&str| CopySpec { device: (*device).to_owned(), worker_config: toml::Table::new() };
            ModelSpec { copies: devices.iter().map(copy).collect(), ..model(name, "f", true) }
        };
        let mut models = [on("a", &["0", "1"]), on("b", &["1", "2"]), on("c", &["3"])];
        name_all(&mut models, &[]);
        assert_eq!(names(&models), ["a", "a", "c"]);
        let recorded =
            [RecordedModel::of(&ModelSpec { weights: "a#2".to_owned(), ..on("a", &["0"]) }, false)];
        let mut more = [on("a", &["0", "1"])];
        name_all(&mut more, &recorded);
        assert_eq!(names(&more), ["a#2"], "one more device keeps the copy that is there");
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
