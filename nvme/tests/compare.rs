//! The Compare command: blocks are compared with data in the controller.

use defuse_block::{BlockDevice, BlockingQueue, Errno, RamDevice};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::spec::CommandStatus;
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeError, NvmeOptions};

/// More than one command, of two pages at most.
const BLOCKS: usize = 7;

fn open(shape: ModelProperties) -> (ControllerModel, NvmeDevice) {
    let model = ControllerModel::with(&RamDevice::new(4096, 64), 5, shape).unwrap();
    let disk = NvmeDevice::open(model.clone(), &NvmeOptions::default()).unwrap();
    (model, disk)
}

fn data() -> Vec<u8> {
    (0..BLOCKS * 4096).map(|at| (at / 100) as u8).collect()
}

#[test]
fn blocks_equal_their_data_and_differ_by_any_byte() {
    let (_, disk) = open(ModelProperties { mdts: 1, ..ModelProperties::default() });
    let data = data();
    BlockingQueue::new(&disk).unwrap().write(9, &data).unwrap();
    assert!(disk.compare(9, &data).unwrap());
    for at in [0, 5000, data.len() - 1] {
        let mut other = data.clone();
        other[at] ^= 1;
        assert!(!disk.compare(9, &other).unwrap(), "byte {at}");
    }
    let mut same = vec![0; data.len()];
    BlockingQueue::new(&disk).unwrap().read(9, &mut same).unwrap();
    assert!(same == data, "nothing was written");
    assert!(disk.queue(1).is_ok(), "the queues of the calls are free again");
}

#[test]
fn what_cannot_be_compared_is_an_error() {
    let (model, disk) = open(ModelProperties { compares: false, ..ModelProperties::default() });
    let errno = |disk: &NvmeDevice, block, data: &[u8]| match disk.compare(block, data) {
        Err(NvmeError::System { errno, .. }) => errno,
        other => panic!("{other:?}"),
    };
    assert_eq!(errno(&disk, 0, &[0; 4096]), Errno::OPNOTSUPP);
    assert_eq!(model.commands(), 0, "it is not asked for what it does not have");
    let (model, disk) = open(ModelProperties::default());
    assert_eq!(errno(&disk, 64, &[0; 4096]), Errno::INVAL);
    assert_eq!(errno(&disk, 0, &[0; 100]), Errno::INVAL);
    model.fail(|_| Some(ControllerFault::Refuse(CommandStatus::READ_ERROR)));
    assert_eq!(errno(&disk, 0, &[0; 4096]), Errno::IO);
}

#[test]
fn a_reset_in_between_changes_no_answer() {
    for fault in [ControllerFault::Break, ControllerFault::Refuse(CommandStatus::INTERNAL)] {
        let (model, disk) = open(ModelProperties::default());
        model.fail(move |victim| (victim.number % 2 == 0).then_some(fault));
        assert!(disk.compare(3, &[0; 4096]).unwrap(), "{fault:?}");
        assert!(!disk.compare(3, &[1; 4096]).unwrap(), "{fault:?}");
    }
}
