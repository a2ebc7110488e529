//! An open file whose name is about to be removed or given to another object: the bytes of the object come here before, since a store
//! serves nothing without a name. Knows no request that changes the object.

use super::OpenObject;
use super::spill::stage_bytes;
use crate::names::file_number;
use spurline_types::Result;
use std::sync::Arc;

/// Longest file whose bytes are kept: the removal waits for these.
const KEPT_MAX: u64 = 1 << 30;
/// Bytes that are kept at a time.
const KEPT_PIECE: u64 = 8 << 20;

/// Keeps all bytes of an open file here, or in spilled parts, for reads after the removal. Those of a longer file, or after a failure,
/// are read from caches then, as long as these have the bytes.
pub(crate) fn keep_all_bytes(file: &Arc<OpenObject>) {
    if let Err(error) = keep_pieces(file) {
        let path = String::from_utf8_lossy(&file.path()).into_owned();
        tracing::warn!("'/{path}' is open and loses its name, and reads of the open file may fail: {error}");
    }
}

fn keep_pieces(file: &Arc<OpenObject>) -> Result<()> {
    if file.object().is_none_or(|object| object.size == 0 || object.size > KEPT_MAX) {
        return Ok(());
    }
    // Writes of other files can move the bytes to the store.
    file.context.writing.lock().insert(file_number(&file.unpublished), file);
    // As long as a program has the file open.
    while Arc::strong_count(file) > 1 {
        match keep_piece(file) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => file.make_room_elsewhere(error).map_or(Ok(()), Err)?,
        }
    }
    file.keep_state_now();
    Ok(())
}

/// Keeps bytes that only the object has; false if there are none.
fn keep_piece(file: &OpenObject) -> Result<bool> {
    let mut changes = file.changes.lock();
    let Some(range) = file.stage(&mut changes)?.first_of_object(KEPT_PIECE) else { return Ok(false) };
    let mut piece = vec![0; (range.end - range.start) as usize];
    file.read_object(file.object().as_ref(), range.start, &mut piece)?;
    stage_bytes(file, &mut changes, &|staged| staged.write(range.start, &piece)).map(|()| true)
}
