//! [`GrowingRange`]: device memory of one process that grows and shrinks at one address, a unit at a time.
//!
//! Addresses for the most it may ever hold are reserved at the start, so what lies in it never moves and a captured graph
//! stays valid. Units have exportable handles: a pool can later be handed to another process.

use super::driver::{Access, Code, Refusal};
use super::physical::Physical;
use super::range::AddressRange;
use super::writable::out_of_memory;
use super::{Context, Device};

#[derive(Debug)]
pub struct GrowingRange {
    range: AddressRange,
    unit_bytes: u64,
    /// That may be used. More are mapped only after the driver refused to take them back.
    units: u64,
    max_units: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    #[error("{}", out_of_memory(*.asked_bytes, *.free_bytes))]
    OutOfMemory { asked_bytes: u64, free_bytes: Option<u64> },
    #[error("{asked} units are beyond the {max} that were reserved")]
    BeyondReservation { asked: u64, max: u64 },
    #[error("memory cannot be added to or taken from the range")]
    Refused(#[from] Refusal),
}

impl GrowingRange {
    /// Reserves addresses for `max_units` of at least `unit_bytes`, rounded up to whole granules; no memory yet.
    pub fn reserve(device: &Device, unit_bytes: u64, max_units: u64) -> Result<Self, GrowError> {
        let beyond = GrowError::BeyondReservation { asked: max_units, max: 0 };
        let sizes =
            device.allocated_bytes(unit_bytes).and_then(|unit| Some((unit, unit.checked_mul(max_units)?)));
        let Some((unit_bytes, total)) = sizes.filter(|sizes| sizes.1 > 0) else {
            return Err(beyond);
        };
        let range = AddressRange::reserve(device, total)?;
        Ok(Self { range, unit_bytes, units: 0, max_units })
    }

    /// Of unit 0; unit n follows n * `unit_bytes` later. Never changes.
    pub fn address(&self) -> u64 {
        self.range.address()
    }

    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// How many stand behind the address now.
    pub fn units(&self) -> u64 {
        self.units
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.range.mapped_bytes()
    }

    /// Makes `units` stand behind the address, if there are fewer. What was there stays, also on an error, and then
    /// nothing new does. The new memory holds anything.
    pub fn grow_to(&mut self, context: &Context, units: u64) -> Result<(), GrowError> {
        if units > self.max_units {
            return Err(GrowError::BeyondReservation { asked: units, max: self.max_units });
        }
        if units <= self.units {
            return Ok(());
        }
        context.bind()?;
        let before = self.units;
        let grown = self.add(units);
        grown.map_err(|refusal| {
            // The new units are in nobody's use, so no fence is needed to take them back. Should that fail too, they
            // stay mapped and unused until the range grows again, or goes.
            let _ = self.remove(before);
            match refusal.code {
                Code::OUT_OF_MEMORY => GrowError::OutOfMemory {
                    asked_bytes: (units - before) * self.unit_bytes,
                    free_bytes: self.range.device().memory_info().map(|info| info.free_bytes),
                },
                _ => GrowError::Refused(refusal),
            }
        })
    }

    /// Takes units away until `units` are left, the last one first. `fence` must wait for all work that could touch them: it
    /// is called once, before the first goes, and if it fails all stay. If the driver refuses one, that and those before it
    /// stay.
    pub fn shrink_to<E: From<GrowError>>(
        &mut self,
        units: u64,
        fence: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if units < self.mapped_units() {
            fence()?;
            self.remove(units).map_err(GrowError::Refused)?;
        }
        Ok(())
    }

    fn mapped_units(&self) -> u64 {
        self.range.mapped_bytes() / self.unit_bytes
    }

    fn add(&mut self, units: u64) -> Result<(), Refusal> {
        for unit in self.mapped_units()..units {
            let physical = Physical::create(self.range.device(), self.unit_bytes)?;
            self.range.map(unit * self.unit_bytes, &physical)?;
        }
        let start = self.units * self.unit_bytes;
        self.range.allow(start, units * self.unit_bytes - start, Access::ReadWrite)?;
        self.units = units;
        Ok(())
    }

    fn remove(&mut self, units: u64) -> Result<(), Refusal> {
        for last in (units..self.mapped_units()).rev() {
            self.range.unmap(last * self.unit_bytes)?;
            self.units = self.units.min(last);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::driver::{Call, Driver};
    use super::super::fake::GRANULE;
    use super::super::tests::{TOTAL, fake};
    use super::*;

    #[test]
    fn range_grows_and_shrinks_behind_the_fence_at_one_address() {
        let (fake, device) = fake(4 * GRANULE);
        let context = device.context().unwrap();
        let mut range = GrowingRange::reserve(&device, GRANULE - 5, 8).unwrap();
        assert_eq!(range.unit_bytes(), GRANULE);
        assert_eq!(fake.used(), 0);
        range.grow_to(&context, 2).unwrap();
        let address = range.address();
        // SAFETY: of the fake, which checks every access.
        unsafe { fake.copy_to_device(address + GRANULE, b"kept") }.unwrap();

        let error = range.grow_to(&context, 5).unwrap_err();
        assert!(
            matches!(error, GrowError::OutOfMemory { asked_bytes, free_bytes: Some(free) }
                if asked_bytes == 3 * GRANULE && free == 2 * GRANULE),
            "{error}"
        );
        assert_eq!((range.units(), range.address()), (2, address));
        assert!(matches!(
            range.grow_to(&context, 9).unwrap_err(),
            GrowError::BeyondReservation { asked: 9, max: 8 }
        ));
        range.grow_to(&context, 4).unwrap();

        let failed: Result<(), GrowError> =
            range.shrink_to(1, || Err(GrowError::BeyondReservation { asked: 0, max: 0 }));
        assert!(failed.is_err());
        assert_eq!((range.units(), fake.used()), (4, 4 * GRANULE));
        let mut fences = 0;
        let fence = || -> Result<(), GrowError> {
            fences += 1;
            assert_eq!(fake.used(), 4 * GRANULE);
            Ok(())
        };
        range.shrink_to(2, fence).unwrap();
        assert_eq!((fences, range.units(), fake.used()), (1, 2, 2 * GRANULE));
        let mut read = [0; 4];
        // SAFETY: as above.
        unsafe { fake.copy_from_device(&mut read, address + GRANULE) }.unwrap();
        assert_eq!(&read, b"kept");
        drop((range, context));
        fake.assert_clean();
    }

    #[test]
    fn growth_that_fails_at_any_allocation_says_what_is_wanted_free_and_missing() {
        const WANTED: u64 = 4;
        for room in 0..WANTED {
            let (fake, device) = fake((1 + room) * GRANULE);
            let context = device.context().unwrap();
            let mut range = GrowingRange::reserve(&device, GRANULE, 1 + WANTED).unwrap();
            range.grow_to(&context, 1).unwrap();
            let text = range.grow_to(&context, 1 + WANTED).unwrap_err().to_string();
            // Granules of 2 MiB; what the failed attempt had got counts as free again.
            for (mib, what) in [(8, ": "), (2 * room, " are free"), (8 - 2 * room, " are missing")] {
                assert!(
                    text.contains(&format!("{mib}.0 MiB{what}")),
                    "{what:?} in {text:?}, room for {room}"
                );
            }
            assert_eq!(fake.used(), GRANULE);
            drop((range, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn refused_growth_leaves_the_range_as_it_was() {
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
            let (fake, device) = fake(TOTAL);
            let context = device.context().unwrap();
            let mut range = GrowingRange::reserve(&device, GRANULE, 4).unwrap();
            range.grow_to(&context, 1).unwrap();
            fake.refuse(call, usize::from(call != Call::MemSetAccess), 1, Code::OPERATING_SYSTEM);
            let error = range.grow_to(&context, 4).unwrap_err();
            assert!(matches!(error, GrowError::Refused(refusal) if refusal.call == call), "{error:?}");
            assert_eq!((range.units(), range.mapped_bytes(), fake.used()), (1, GRANULE, GRANULE));
            range.grow_to(&context, 4).unwrap();
            drop((range, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn units_that_the_driver_does_not_take_back_are_still_known() {
        for refused in 0..3 {
            let (fake, device) = fake(TOTAL);
            let context = device.context().unwrap();
            let mut range = GrowingRange::reserve(&device, GRANULE, 4).unwrap();
            range.grow_to(&context, 4).unwrap();
            fake.refuse(Call::MemUnmap, refused, 1, Code::OPERATING_SYSTEM);
            let error = range.shrink_to(1, || Ok::<(), GrowError>(())).unwrap_err();
            assert!(
                matches!(error, GrowError::Refused(refusal) if refusal.call == Call::MemUnmap),
                "{error:?}"
            );
            let left = 4 - refused as u64;
            assert_eq!(
                (range.units(), range.mapped_bytes(), fake.used()),
                (left, left * GRANULE, left * GRANULE)
            );
            // SAFETY: of the fake, which checks every access.
            unsafe { fake.copy_to_device(range.address() + (left - 1) * GRANULE, b"of use") }.unwrap();
            range.shrink_to(1, || Ok::<(), GrowError>(())).unwrap();
            assert_eq!((range.units(), fake.used()), (1, GRANULE));
            range.grow_to(&context, 4).unwrap();
            drop((range, context));
            fake.assert_clean();
        }
    }

    #[test]
    fn units_of_a_refused_growth_that_stay_are_taken_by_the_next() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        let mut range = GrowingRange::reserve(&device, GRANULE, 4).unwrap();
        range.grow_to(&context, 1).unwrap();
        fake.refuse(Call::MemSetAccess, 0, 1, Code::OPERATING_SYSTEM);
        fake.refuse(Call::MemUnmap, 1, 1, Code::OPERATING_SYSTEM);
        let error = range.grow_to(&context, 4).unwrap_err();
        assert!(
            matches!(error, GrowError::Refused(refusal) if refusal.call == Call::MemSetAccess),
            "{error:?}"
        );
        assert_eq!((range.units(), range.mapped_bytes(), fake.used()), (1, 3 * GRANULE, 3 * GRANULE));
        let created = fake.count(Call::MemCreate);
        range.grow_to(&context, 4).unwrap();
        assert_eq!((range.units(), fake.used(), fake.count(Call::MemCreate)), (4, 4 * GRANULE, created + 1));
        // SAFETY: of the fake, which checks every access.
        unsafe { fake.copy_to_device(range.address(), &vec![1; 4 * GRANULE as usize]) }.unwrap();
        drop((range, context));
        fake.assert_clean();
    }

    #[test]
    fn addresses_under_a_mapping_that_stays_are_not_freed() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        let mut range = GrowingRange::reserve(&device, GRANULE, 3).unwrap();
        range.grow_to(&context, 3).unwrap();
        fake.refuse(Call::MemUnmap, 1, 1, Code::OPERATING_SYSTEM);
        drop((range, context));
        assert_eq!(
            (fake.used(), fake.count(Call::MemUnmap), fake.count(Call::MemAddressFree)),
            (GRANULE, 3, 0)
        );
        assert_eq!(fake.breaches(), Vec::<String>::new());
    }

    proptest! {
        #[test]
        fn growing_range_holds_exactly_what_it_says(
            capacity in 1u64..8,
            steps in prop::collection::vec((any::<bool>(), 0u64..10), 1..30),
        ) {
            let (fake, device) = fake(capacity * GRANULE);
            let context = device.context().unwrap();
            let mut range = GrowingRange::reserve(&device, GRANULE, 8).unwrap();
            for (grow, units) in steps {
                let before = range.units();
                let expected = match grow {
                    true if units > 8 || units > capacity.max(before) => before,
                    true => before.max(units),
                    false => before.min(units),
                };
                let result = if grow {
                    range.grow_to(&context, units)
                } else {
                    range.shrink_to(units, || Ok::<(), GrowError>(()))
                };
                prop_assert_eq!(result.is_err(), grow && (units > 8 || units > capacity.max(before)));
                prop_assert_eq!(range.units(), expected);
                prop_assert_eq!(fake.used(), expected * GRANULE);
            }
            drop((range, context));
            fake.assert_clean();
        }
    }
}
