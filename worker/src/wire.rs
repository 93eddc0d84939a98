// SPDX-License-Identifier: Apache-2.0

//! Converts between messages of `ballast.worker.v1` and the worker's own types.

pub(crate) mod defaults;
pub(crate) mod frames;
pub(crate) mod request;
pub(crate) mod status;
