// SPDX-License-Identifier: Apache-2.0

// CHECK_SIGNATURE(kernel, Name) fails the build if the parameter types of a kernel differ from
// `kernel Name(...)` in kernels/src/cuda/abi. The launcher's arguments have the types of the
// latter. Each kernel is followed by its check.

#pragma once

template <class A, class B>
constexpr bool is_same_type = false;
template <class A>
constexpr bool is_same_type<A, A> = true;

#define CHECK_SIGNATURE(KERNEL, NAME)                        \
    static_assert(is_same_type<decltype(KERNEL), abi::NAME>, \
                  "the parameters of " #KERNEL " are not those of kernel " #NAME " in kernels/src/cuda/abi")
