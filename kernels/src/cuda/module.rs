// SPDX-License-Identifier: Apache-2.0

//! [`image!`]: the image that build.rs made of a .cu file.

/// The image of `kernels/cuda/<stem>.cu`.
macro_rules! image {
    ($stem:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $stem, ".fatbin")).as_slice()
    };
}
pub(super) use image;
