//! Reads a tensor that deltas change.
//!
//! Before its first byte is served, the checksum of all its bytes after the last delta is compared. Its changes are decoded
//! for that, and again after the patch cache evicted them. If the checksum differs, those of earlier deltas tell which delta
//! is at fault.

use std::sync::Arc;

use crate::checkpoint::damaged_deltas::record_damage;
use crate::checkpoint::patch::{
    Hasher, LayerError, LayerSource, Patch, PatchAllowance, PatchError, decode, patch_cache,
};
use crate::checkpoint::tensor::{OriginId, PatchDamage, PatchedBytes};
use crate::source::{Damage, ReadAt, SourceError};

use super::plain_origins::PlainOrigins;

/// Bytes of a tensor that are read and hashed at once.
const CHECKSUM_READ_BYTES: u64 = 1 << 20;

/// A patched tensor whose origins are open.
#[derive(Debug)]
pub struct PatchedReader {
    bytes: Arc<PatchedBytes>,
    origins: Arc<PlainOrigins>,
}

/// Why no patch was decoded.
enum PatchFailure {
    /// The delta is damaged, which no later read can change.
    Damage(PatchDamage),
    Source(SourceError),
}

impl From<PatchDamage> for PatchFailure {
    fn from(damage: PatchDamage) -> PatchFailure {
        PatchFailure::Damage(damage)
    }
}

impl From<SourceError> for PatchFailure {
    fn from(error: SourceError) -> PatchFailure {
        PatchFailure::Source(error)
    }
}

impl PatchedReader {
    pub fn new(bytes: &Arc<PatchedBytes>, origins: &Arc<PlainOrigins>) -> PatchedReader {
        PatchedReader { bytes: Arc::clone(bytes), origins: Arc::clone(origins) }
    }

    /// The origins that it is made of. One may be named more than once.
    pub fn read_origins(&self) -> impl Iterator<Item = OriginId> {
        self.bytes.origins()
    }

    /// Fails if a file that it is made of changed since it was parsed.
    pub fn check_unchanged(&self) -> Result<(), SourceError> {
        let mut checked = None;
        self.bytes.origins().try_for_each(|origin| match checked.replace(origin) {
            Some(before) if before == origin => Ok(()),
            _ => self.origins.check_unchanged(origin),
        })
    }

    /// The changes around a byte.
    fn patch_at(&self, at: u64) -> Result<Arc<Patch>, SourceError> {
        let bytes = &*self.bytes;
        let damaged = |damage: &PatchDamage| self.damage_error(damage);
        if let Some(Err(damage)) = bytes.verification.get() {
            return Err(damaged(damage));
        }
        let decoded = patch_cache().get_or_decode(bytes.id, at, |allowance| {
            // Another thread may have compared it meanwhile.
            match bytes.verification.get() {
                Some(Ok(())) => self.decode(at, allowance),
                Some(Err(damage)) => Err(PatchFailure::Source(damaged(damage))),
                None => self.verify(at, allowance),
            }
        });
        decoded.map_err(|failure| match failure {
            PatchFailure::Source(error) => error,
            PatchFailure::Damage(damage) => {
                let error = damaged(&damage);
                // If a file changed meanwhile, the delta itself may be sound.
                if let Err(error) = self.check_unchanged() {
                    return error;
                }
                self.record_damage(&damage);
                let _ = bytes.verification.set(Err(Arc::new(damage)));
                error
            }
        })
    }

    /// Decodes the changes by all deltas around a byte.
    fn decode(&self, at: u64, allowance: &mut PatchAllowance<'_>) -> Result<Patch, PatchFailure> {
        self.decode_first(self.bytes.layers.len(), at, allowance)
    }

    /// Decodes the changes by the first `count` deltas around a byte.
    fn decode_first(
        &self,
        count: usize,
        at: u64,
        allowance: &mut PatchAllowance<'_>,
    ) -> Result<Patch, PatchFailure> {
        let layers: Vec<LayerSource<'_>> = (self.bytes.layers[..count].iter())
            .map(|layer| LayerSource {
                source: self.origins.origin(layer.blob.origin),
                offset: layer.blob.offset,
                len: layer.blob.len,
                encoding: layer.encoding,
            })
            .collect();
        let decoded = decode(&layers, self.bytes.len(), at, allowance);
        decoded.map_err(|LayerError { layer, error }| match error {
            PatchError::Source(error) => PatchFailure::Source(error),
            error => PatchFailure::Damage(PatchDamage {
                origin: self.bytes.layers[layer].blob.origin,
                reason: error.to_string(),
            }),
        })
    }

    /// Compares the checksum of all bytes, and returns the changes around a byte.
    fn verify(&self, at: u64, allowance: &mut PatchAllowance<'_>) -> Result<Patch, PatchFailure> {
        let bytes = &*self.bytes;
        let (patch, found) = self.apply_first(bytes.layers.len(), allowance)?;
        if let Err(digits) = found {
            drop(patch);
            return Err(self.find_damaged_layer(digits, allowance)?.into());
        }
        self.check_unchanged()?;
        let _ = bytes.verification.set(Ok(()));
        if patch.range().contains(&at) { Ok(patch) } else { self.decode(at, allowance) }
    }

    /// Applies the first `count` deltas, at least one, to all bytes. Returns the last part of the changes, and the checksum
    /// if it is not the stated one.
    fn apply_first(
        &self,
        count: usize,
        allowance: &mut PatchAllowance<'_>,
    ) -> Result<(Patch, Result<(), String>), PatchFailure> {
        let bytes = &*self.bytes;
        let checksum = &bytes.layers[count - 1].checksum;
        let mut hasher = Hasher::new(checksum.format);
        let mut buffer = vec![0; bytes.len().min(CHECKSUM_READ_BYTES) as usize];
        let mut done = 0;
        let patch = loop {
            let patch = self.decode_first(count, done, allowance)?;
            while done < patch.range().end {
                let part = (patch.range().end - done).min(CHECKSUM_READ_BYTES) as usize;
                let part = &mut buffer[..part];
                self.origins.read(&bytes.base, done, part)?;
                patch.apply(done, part);
                hasher.update(part);
                done += part.len() as u64;
            }
            if done == bytes.len() {
                break patch;
            }
        };
        let digits = hasher.digits();
        let is_stated = *digits == *checksum.digits;
        Ok((patch, if is_stated { Ok(()) } else { Err(digits) }))
    }

    /// Finds a delta whose checksum fails although that of the delta before it holds. `digits` is the wrong checksum
    /// after the last delta.
    fn find_damaged_layer(
        &self,
        digits: String,
        allowance: &mut PatchAllowance<'_>,
    ) -> Result<PatchDamage, PatchFailure> {
        let layers = &self.bytes.layers;
        let (mut good, mut bad, mut digits) = (0, layers.len(), digits);
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            match self.apply_first(middle, allowance)?.1 {
                Ok(()) => good = middle,
                Err(found) => (bad, digits) = (middle, found),
            }
        }
        let layer = &layers[bad - 1];
        let reason = format!(
            "its checksum is {digits} and should be {}: the delta is damaged, or made for another base",
            layer.checksum.digits
        );
        Ok(PatchDamage { origin: layer.blob.origin, reason })
    }

    /// Ends chains of this process before the delta from now on.
    fn record_damage(&self, damage: &PatchDamage) {
        let base = self.bytes.base.first_extent().origin;
        if let Some(delta) = self.origins.file(damage.origin) {
            let base = self.origins.file(base).map(|file| file.file().identity());
            record_damage(delta.file().identity(), base, self.damage_error(damage));
        }
    }

    fn last_delta(&self) -> OriginId {
        self.bytes.layers.last().map_or(OriginId(0), |layer| layer.blob.origin)
    }

    fn damage_error(&self, damage: &PatchDamage) -> SourceError {
        let file = self.origins.file(damage.origin);
        let path = file.map(|file| file.file().path()).unwrap_or_default();
        let PatchedBytes { tensor, .. } = &*self.bytes;
        let reason = format!("tensor `{tensor}`: {}", damage.reason);
        let remedy = "have the trainer write the version again, or a full one; earlier versions stay as they are";
        SourceError::Damaged { path, damage: Box::new(Damage { reason, remedy: remedy.into() }) }
    }
}

impl ReadAt for PatchedReader {
    fn size(&self) -> u64 {
        self.bytes.len()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size()) {
            let file = self.origins.file(self.last_delta());
            let path = file.map(|file| file.file().path()).unwrap_or_default();
            return Err(SourceError::Truncated { path, offset });
        }
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let patch = self.patch_at(at)?;
            let len = (patch.range().end - at).min(rest.len() as u64) as usize;
            let (part, after) = rest.split_at_mut(len);
            self.origins.read(&self.bytes.base, at, part)?;
            patch.apply(at, part);
            (at, rest) = (at + len as u64, after);
        }
        Ok(())
    }
}
