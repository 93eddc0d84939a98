// SPDX-License-Identifier: Apache-2.0

//! [`SharedSamplingArguments`]: the sampling parameters of all commands that generate text. Those
//! that are not set are the model's or the server's.

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SharedSamplingArguments {
    #[arg(long, value_name = "K", help = sampling_params::TOP_K.help())]
    pub(crate) top_k: Option<u32>,
    #[arg(long, value_name = "P", help = sampling_params::TOP_P.help())]
    pub(crate) top_p: Option<f32>,
    #[arg(long, value_name = "P", help = sampling_params::MIN_P.help())]
    pub(crate) min_p: Option<f32>,
    #[arg(long, value_name = "R", help = sampling_params::REPETITION_PENALTY.help())]
    pub(crate) repetition_penalty: Option<f32>,
    /// Seed of sampling; the same seed gives the same text [default: random]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
    /// Stop string; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}
