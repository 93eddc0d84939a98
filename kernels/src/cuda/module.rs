// SPDX-License-Identifier: Apache-2.0

//! [`image!`] embeds the image that build.rs compiled from a .cu file.

/// The image of `kernels/cuda/<stem>.cu`.
macro_rules! image {
    ($stem:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $stem, ".fatbin")).as_slice()
    };
}
pub(super) use image;
