//! Macros of the launchers: the image of a .cu file, and the arguments of a launch.

/// The image that build.rs made of `kernels/cuda/<stem>.cu`.
macro_rules! image {
    ($stem:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $stem, ".fatbin")).as_slice()
    };
}
pub(super) use image;

/// Pointers to the arguments of a kernel, for [`cuda::Kernel::launch`].
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        &mut [$((&raw const $argument).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(super) use arguments;
