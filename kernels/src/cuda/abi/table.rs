// SPDX-License-Identifier: Apache-2.0

//! `abi!` defines one table of the interface. It generates Rust items and the
//! [`SharedHeader`](super::SharedHeader) from the same lines, so one cannot change without the
//! other.

/// ```text
/// abi! {
///     header "linear.cuh";
///     include "abi/tiles.cuh";
///     constants {
///         const NAME: usize = 4;                       -> constexpr int NAME = 4;
///     }
///     structs {
///         struct Name [32 bytes, align 16] {           -> struct alignas(16) Name { ... };
///             weights: [u64; 4] as "const uint8_t *",  ->     const uint8_t *weights[4];
///         }
///     }
///     kernels {
///         kernel Name(x: u64 as "const float *");      -> using abi::Name = void(const float *);
///     }
/// }
/// ```
///
/// A device address is a `u64`; its CUDA type follows `as`. An `align` greater than Rust's serves
/// CUDA's vector loads: kernels see such structs only in arrays that begin at a multiple of it.
macro_rules! abi {
    (@type $ty:ty) => { <$ty as super::CudaType>::NAME };
    (@type $ty:ty, $cuda:literal) => { $cuda };
    (@align) => { None };
    (@align $align:literal) => { Some($align) };
    (@text) => { String::new };
    (@text $text:path) => { $text };
    (
        header $file:literal;
        $(include $include:literal;)*
        constants {
            $($(#[doc = $cdoc:literal])* const $constant:ident : $cty:ty = $value:expr;)*
        }
        structs {
            $(
                $(#[doc = $sdoc:literal])*
                $(#[derive($($derive:path),*)])?
                struct $name:ident [$size:literal bytes $(, align $align:literal)?] {
                    $($(#[doc = $fdoc:literal])* $field:ident : $fty:ty $(as $fcuda:literal)?),* $(,)?
                }
            )*
        }
        kernels {
            $(
                $(#[doc = $kdoc:literal])*
                kernel $kernel:ident ($($arg:ident : $aty:ty $(as $acuda:literal)?),* $(,)?);
            )*
        }
        $(text $text:path;)?
    ) => {
        $(
            $(#[doc = $cdoc])*
            #[allow(dead_code, unreachable_pub, reason = "launchers export some constants; some are for kernels alone")]
            pub const $constant: $cty = $value;
            // Headers have whole numbers.
            const _: () = assert!($constant as u64 as $cty == $constant);
        )*

        $(
            $(#[doc = $sdoc])*
            #[derive(Clone, Copy $(, $($derive),*)?)]
            #[repr(C)]
            #[allow(dead_code, unreachable_pub, reason = "the kernels read the fields; launchers export some structs")]
            pub struct $name {
                $($(#[doc = $fdoc])* pub $field: $fty),*
            }

            const _: () = assert!(size_of::<$name>() == $size $( && $size % $align == 0)?);

            impl super::CudaType for $name {
                const NAME: &'static str = stringify!($name);
            }
        )*

        $(
            $(#[doc = $kdoc])*
            #[derive(Clone, Copy)]
            #[allow(dead_code, reason = "build.rs launches nothing")]
            pub(crate) struct $kernel {
                $(pub(crate) $arg: $aty),*
            }

            impl super::KernelArguments for $kernel {
                type Pointers = [*mut std::ffi::c_void; { [$(stringify!($arg)),*].len() }];

                fn pointers(&self) -> Self::Pointers {
                    [$((&raw const self.$arg).cast_mut().cast()),*]
                }
            }
        )*

        /// This table as a CUDA header.
        #[allow(dead_code, reason = "for build.rs and the tests")]
        pub(super) const HEADER: super::SharedHeader = super::SharedHeader {
            file: $file,
            includes: &[$($include),*],
            constants: &[$(super::header::Constant {
                doc: &[$($cdoc),*],
                name: stringify!($constant),
                cuda_type: abi!(@type $cty),
                value: $constant as u64,
            }),*],
            structs: &[$(super::header::StructLayout {
                doc: &[$($sdoc),*],
                name: stringify!($name),
                size: size_of::<$name>(),
                align: abi!(@align $($align)?),
                fields: &[$(super::FieldLayout {
                    doc: &[$($fdoc),*],
                    name: stringify!($field),
                    cuda_type: abi!(@type $fty $(, $fcuda)?),
                    count: <$fty as super::CudaType>::COUNT,
                    offset: std::mem::offset_of!($name, $field),
                }),*],
            }),*],
            signatures: &[$(super::header::Signature {
                doc: &[$($kdoc),*],
                name: stringify!($kernel),
                parameters: &[$(super::FieldLayout {
                    doc: &[],
                    name: stringify!($arg),
                    cuda_type: abi!(@type $aty $(, $acuda)?),
                    count: None,
                    offset: std::mem::offset_of!($kernel, $arg),
                }),*],
            }),*],
            text: abi!(@text $($text)?),
        };
    };
}
