// SPDX-License-Identifier: Apache-2.0

//! [`launch_kernel`] enqueues a kernel launch. The build has checked the kernel's name and its
//! arguments.

use std::ffi::CStr;
use std::marker::PhantomData;

use super::abi::KernelArguments;
use super::spread::shared_bytes_to_spread;
use super::{CudaError, LaunchConfig, LazyModule, Stream};

include!(concat!(env!("OUT_DIR"), "/compiled_kernels.rs"));

/// The name of a kernel that takes arguments of type `A`. [`kernel_name!`] makes one.
pub(super) struct KernelName<A> {
    name: &'static CStr,
    arguments: PhantomData<fn(A)>,
}

impl<A> Clone for KernelName<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for KernelName<A> {}

impl<A> KernelName<A> {
    /// `name` ends with a zero byte. If `image` holds no such kernel, the function panics. It runs
    /// in a constant, so the panic fails the build.
    pub(super) const fn new(image: &str, name: &'static str) -> Self {
        let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else {
            panic!("the name of a kernel must end with a zero byte");
        };
        assert!(
            is_compiled(image, name.to_bytes()),
            "no such kernel: nvcc did not compile it into this image"
        );
        Self { name, arguments: PhantomData }
    }

    pub(super) fn as_c_str(self) -> &'static CStr {
        self.name
    }
}

/// Whether build.rs found the kernel in the image. An image without names has PTX alone, and every
/// name is accepted for it.
const fn is_compiled(image: &str, kernel: &[u8]) -> bool {
    let mut at = 0;
    while at < COMPILED_KERNELS.len() {
        let (stem, names) = COMPILED_KERNELS[at];
        if is_equal(stem.as_bytes(), image.as_bytes()) {
            let mut index = 0;
            while index < names.len() {
                if is_equal(names[index].as_bytes(), kernel) {
                    return true;
                }
                index += 1;
            }
            return names.is_empty();
        }
        at += 1;
    }
    false
}

const fn is_equal(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut at = 0;
    while at < a.len() {
        if a[at] != b[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// `kernel_name!("norm", "rms_norm")` names a kernel of norm.cu. If nvcc did not compile the
/// kernel, this crate does not build.
macro_rules! kernel_name {
    ($image:expr, $name:expr) => {
        const { $crate::cuda::launch::KernelName::new($image, concat!($name, "\0")) }
    };
}
pub(super) use kernel_name;

/// Enqueues one launch.
///
/// # Safety
/// All memory that the kernel reads or writes with `arguments` stays valid until the kernel has
/// ended.
pub(super) unsafe fn launch_kernel<A: KernelArguments>(
    family: &LazyModule,
    name: KernelName<A>,
    stream: &Stream,
    launch: LaunchConfig,
    arguments: &A,
) -> Result<(), CudaError> {
    let kernel = family.kernel(name.as_c_str())?;
    // SAFETY: `A` has a field for each parameter of the kernel, in order and of the parameter's
    // type. CHECK_SIGNATURE compared them when the kernel was compiled. The rest is the caller's
    // contract.
    unsafe { kernel.launch(stream, launch, arguments.pointers().as_mut()) }
}

/// [`launch_kernel`] for a kernel without dynamic shared memory. Its blocks are spread over the
/// multiprocessors (`spread.rs`).
///
/// # Safety
/// As [`launch_kernel`].
pub(super) unsafe fn launch_spread<A: KernelArguments>(
    family: &LazyModule,
    name: KernelName<A>,
    stream: &Stream,
    launch: LaunchConfig,
    arguments: &A,
) -> Result<(), CudaError> {
    assert_eq!(launch.shared_bytes, 0, "a kernel that uses dynamic shared memory");
    let (x, y, z) = launch.grid;
    let shared_bytes = shared_bytes_to_spread(stream.device(), x * y * z);
    // SAFETY: the caller's contract. The kernel does not know of the shared memory.
    unsafe { launch_kernel(family, name, stream, LaunchConfig { shared_bytes, ..launch }, arguments) }
}
