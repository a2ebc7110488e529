//! The names that a client writes objects under: two files of the client that write one object at the same time would mix their bytes.
//! Knows no files.

use crate::failure::CallFailure;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;

/// What holds a name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameHolder {
    /// A write of a whole file, which ends by itself.
    Put,
    /// A file that a program has open.
    File,
}

/// The names that are written now.
#[derive(Default)]
pub(crate) struct WritingNames {
    held: Mutex<HashMap<Vec<u8>, NameHolder>>,
    freed: Condvar,
}

/// A name, free again when this is dropped.
pub(crate) struct HeldName {
    names: Arc<WritingNames>,
    path: Vec<u8>,
}

impl WritingNames {
    /// Holds a name; waits for writes of whole files under this name.
    ///
    /// # Errors
    /// `EBUSY` while a program has a file of the name open for writing.
    pub fn hold(self: &Arc<Self>, path: &[u8], holder: NameHolder) -> Result<HeldName, CallFailure> {
        let mut held = self.held.lock();
        loop {
            match held.get(path) {
                None => break,
                Some(NameHolder::Put) => self.freed.wait(&mut held),
                Some(NameHolder::File) => {
                    let why = "this client has the file open for writing; close it first";
                    return Err(CallFailure::new(Errno::BUSY, why).of_path(path));
                }
            }
        }
        held.insert(path.to_vec(), holder);
        Ok(HeldName { names: Arc::clone(self), path: path.to_vec() })
    }
}

impl Drop for HeldName {
    fn drop(&mut self) {
        self.names.held.lock().remove(&self.path);
        self.names.freed.notify_all();
    }
}
