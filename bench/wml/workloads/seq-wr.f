# Rows 21 to 28: each thread makes one file and writes it from its beginning
# to its end. The set `nothing` never has a file, and so ends the thread.

set $dir=/tmp
set $nfiles=1
set $filesize=60g
set $nthreads=1
set $iosize=4k
set $writes=15728640

set mode quit alldone

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$nfiles,dirgamma=0
define fileset name=nothing,path=$dir,entries=1,size=0,dirwidth=1,dirgamma=0

define process name=writer,instances=1
{
  thread name=writer,instances=$nthreads
  {
    flowop createfile name=create,filesetname=data,fd=1
    flowop write name=write,fd=1,iosize=$iosize,iters=$writes
    flowop closefile name=close,fd=1
    flowop statfile name=end,filesetname=nothing
  }
}

create files
psrun -10
