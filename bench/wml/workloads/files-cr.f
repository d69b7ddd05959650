# Rows 37 and 38: make every file of the set. A thread ends when none is left.

set $dir=/tmp
set $nfiles=4000000
set $filesize=4k
set $dirwidth=1000
set $nthreads=1

set mode quit alldone

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,dirgamma=0

define process name=creator,instances=1
{
  thread name=creator,instances=$nthreads
  {
    flowop createfile name=create,filesetname=data,fd=1
    flowop writewholefile name=write,fd=1
    flowop closefile name=close,fd=1
  }
}

create files
psrun -10
