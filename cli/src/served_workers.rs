// SPDX-License-Identifier: Apache-2.0

//! How many workers the router uses for each model.

use std::collections::HashMap;

use proto::v1::ListModelsReply;

/// The workers that the router uses, by model. While a model is swapped, and for a moment after it,
/// the router lists the model once for each file: the file with most workers counts. Of one file,
/// the router lists workers on devices that compute differently one by one: they count together.
pub(crate) fn served_workers(reply: ListModelsReply) -> HashMap<String, u32> {
    let mut of_file: HashMap<(String, String), u32> = HashMap::new();
    for model in reply.models {
        *of_file.entry((model.name, model.digest)).or_default() += model.workers;
    }
    let mut served = HashMap::new();
    for ((name, _), of_file) in of_file {
        let workers: &mut u32 = served.entry(name).or_default();
        *workers = of_file.max(*workers);
    }
    served
}

#[cfg(test)]
mod tests {
    use proto::v1::Model;

    use super::*;

    #[test]
    fn devices_of_one_file_add_up_and_two_files_do_not() {
        let model = |name: &str, digest: &str, workers| Model {
            name: name.to_owned(),
            digest: digest.to_owned(),
            workers,
            ..Model::default()
        };
        let models = vec![model("m", "a", 2), model("m", "a", 1), model("m", "b", 2), model("n", "a", 5)];
        let served = served_workers(ListModelsReply { models });
        assert_eq!(served, HashMap::from([("m".to_owned(), 3), ("n".to_owned(), 5)]));
    }
}
