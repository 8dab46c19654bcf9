//! Any bytes as an index of shards: without permission no shard that it names lies outside the directory.
#![no_main]

use std::path::{Component, Path};

use ckptfs::checkpoint::parse_index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let inside = parse_index(bytes, false);
    let anywhere = parse_index(bytes, true);
    if let Ok(index) = inside {
        for shard in index.shards() {
            let mut parts = Path::new(shard).components();
            assert!(parts.next().is_some(), "a shard without a name");
            let stays = |part| matches!(part, Component::Normal(_));
            assert!(Path::new(shard).components().all(stays), "{shard:?} leads out");
        }
        let anywhere = anywhere.expect("what is inside is somewhere");
        assert_eq!(anywhere.shards(), index.shards());
        let same = |place| anywhere.tensors_in(place).eq(index.tensors_in(place));
        assert!((0..index.shards().len()).all(same));
    }
});
